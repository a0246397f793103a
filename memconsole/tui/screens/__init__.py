"""The screens and dialogs that any other screen may open."""
