"""The training loop: set-up, steps, saving, and what is said of them."""
