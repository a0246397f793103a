"""The data pipeline: documents to token rows."""
