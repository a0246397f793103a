"""The plan: the user's settings, their allowed values, and the catalogs of models, devices and datasets."""
