"""From texts to batches of tokens: tokenized, cut or packed into rows, held out, counted."""
