"""What starts, supervises, controls and ends runs."""
