"""Reads a Hugging Face config.json into an `Architecture`, one function for each family."""
