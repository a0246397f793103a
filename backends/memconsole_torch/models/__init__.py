"""The models in torch."""
