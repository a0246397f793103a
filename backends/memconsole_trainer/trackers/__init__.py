"""Sends a run's figures to W&B or MLflow, in a process of its own."""
