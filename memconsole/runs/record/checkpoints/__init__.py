"""Which checkpoints are intact, and which a run borrows from another one."""
