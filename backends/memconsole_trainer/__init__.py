"""What both backends share: the training loop, the data pipeline, checkpoints and the engine protocol."""
