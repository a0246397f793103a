"""Loading and saving weights: initial values, checkpoints, Hugging Face directories."""
