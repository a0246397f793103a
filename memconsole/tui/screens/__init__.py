"""The screens and dialogs that every other screen may open."""
