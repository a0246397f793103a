"""The optimizations as specifications that both backends follow to the bit."""
