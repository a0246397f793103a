"""Documents and records as numbered blocks of tokens, kept on disk."""
