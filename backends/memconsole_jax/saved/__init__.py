"""The engine's arrays from and to named tensors: loading weights, checkpoints."""
