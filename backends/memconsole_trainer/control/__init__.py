"""What decides how each batch is trained on."""
