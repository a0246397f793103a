"""The app: what outlives a screen, the run that is followed, and the terminal."""
