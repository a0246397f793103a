"""What the plan screen asks a person and does with the answer: pickers, files, solving, launching."""
