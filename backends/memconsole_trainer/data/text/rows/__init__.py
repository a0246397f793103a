"""Blocks of tokens as the rows of an epoch, batches of them, and the rows held out."""
