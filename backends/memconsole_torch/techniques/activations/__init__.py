"""Activations and losses: what is kept for the backward pass, and what is computed again."""
