"""Tokenizers, and the tokens of a text."""
