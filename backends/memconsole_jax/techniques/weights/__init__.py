"""Weights: their precision, how they are stored, adapters, and their moving average."""
