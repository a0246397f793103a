"""The console in a browser, served on the loopback interface."""
