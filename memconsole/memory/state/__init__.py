"""What a training step is made of before any activation: weights, optimizer state, data, in bytes."""
