"""The tracer: runs the engine's own step on fake tensors and records every allocation."""
