"""Values to lines of styled text, by pure functions."""
