"""Weights in and out: initial values, checkpoints, Hugging Face directories."""
