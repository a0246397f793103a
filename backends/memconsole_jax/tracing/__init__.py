"""The tracer: the engine's own programs compiled, and XLA's account of their memory."""
