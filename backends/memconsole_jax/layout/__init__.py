"""The layout of arrays: stacked over layers, and on one device or spread over several."""
