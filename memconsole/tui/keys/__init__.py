"""The key table, its names and the person's keymap file."""
