"""Optimizers: the update rules, and how and where their state is stored."""
