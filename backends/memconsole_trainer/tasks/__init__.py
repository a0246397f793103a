"""Each task's data in a run: opened, cut into batches, measured."""
