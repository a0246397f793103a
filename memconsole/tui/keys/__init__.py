"""The key table, key names and the user's keymap file."""
