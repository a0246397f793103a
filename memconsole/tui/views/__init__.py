"""What the screens show, each as one immutable value."""
