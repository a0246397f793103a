"""Commands about a plan that is not launched: what it costs, and what fits."""
