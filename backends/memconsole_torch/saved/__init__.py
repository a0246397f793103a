"""The engine's module from and to named tensors: loading weights, checkpoints."""
