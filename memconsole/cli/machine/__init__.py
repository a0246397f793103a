"""Commands about this machine: its devices, and what works on it."""
