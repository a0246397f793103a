"""What a trained model predicts for new data, items for users and outputs for windows; and how it leaves
this program."""
