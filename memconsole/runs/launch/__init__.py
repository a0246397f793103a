"""How a run is started: here, or handed to a scheduler."""
