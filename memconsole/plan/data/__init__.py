"""What a plan's data is: its parts, its lengths, the records it has, and the kinds that can be made."""
