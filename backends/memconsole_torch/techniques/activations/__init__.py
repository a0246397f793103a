"""Techniques for activations and losses: which tensors are kept for the backward pass, and which are recomputed."""
