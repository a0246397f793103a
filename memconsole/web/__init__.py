"""The console in a browser, on the loopback."""
