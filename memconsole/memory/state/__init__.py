"""Bytes of a training step besides activations: weights, optimizer state and data."""
