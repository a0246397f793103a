"""What a trained model predicts for new data: items for users, outputs for windows."""
