"""The app: state that outlives a screen, the followed run, and output to the terminal."""
