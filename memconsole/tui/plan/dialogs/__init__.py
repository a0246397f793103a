"""The dialogs of the plan screen: pickers, files, solving, launching."""
