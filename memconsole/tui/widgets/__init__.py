"""The console's own line-drawing widgets."""
