"""The JAX backend: Flax NNX modules, Optax updates."""
