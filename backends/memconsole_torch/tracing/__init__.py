"""The tracer: the engine's own step on fake tensors, every allocation recorded."""
