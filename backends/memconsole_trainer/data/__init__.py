"""Text and token rows from anywhere to batches, in an order that can be resumed exactly."""
