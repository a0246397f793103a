"""Tables of numbers, cut into windows that a regressor learns from."""
