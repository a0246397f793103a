"""What a trace or a compiler found out about a step, as data that the table takes in."""
