"""The machine that the trainer runs on: its memory, limits and processor."""
