"""The plan screen and its widgets."""
