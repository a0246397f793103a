"""The compiled programs of training, and the functions that they are made of."""
