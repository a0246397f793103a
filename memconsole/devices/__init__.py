"""What this machine has and how full it is."""
