"""One file per optimization, applied around a plain model."""
