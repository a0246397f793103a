"""Code that both backends share: training loop, data pipeline, checkpoints and engine protocol."""
