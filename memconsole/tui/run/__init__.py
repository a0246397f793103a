"""The run screen and its widgets."""
