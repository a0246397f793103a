"""The data pipeline: from text, token rows or windows to batches, in an order that can be resumed
exactly."""
