"""How arrays lie: stacked over layers, on one device or spread over several."""
