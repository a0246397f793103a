"""Ratings as histories of items: read, clustered, split, and ranked by simple baselines."""
