"""Formulas for the activations and temporaries of a training step, one set of modules for each backend."""
