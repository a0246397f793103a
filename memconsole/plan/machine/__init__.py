"""What a plan depends on that this machine has: budget, heap library, processor, text, trackers."""
