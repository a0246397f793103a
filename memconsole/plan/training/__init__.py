"""What settings mean for training: first weights, trained weights, learning rate, resuming."""
