"""Pure functions from values to lines of styled text."""
