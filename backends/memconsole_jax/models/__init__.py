"""The models in JAX."""
