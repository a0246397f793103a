"""What a step holds while it computes, by formula: one program of bytes for each backend."""
