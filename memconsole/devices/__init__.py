"""The devices of this machine and how much of their memory is in use."""
