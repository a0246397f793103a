"""Controllers: they decide how each batch is trained on."""
