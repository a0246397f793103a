"""The tracer: it compiles the engine's own programs and reads XLA's memory plan of them."""
