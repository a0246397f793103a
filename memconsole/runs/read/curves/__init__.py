"""Curves of bounded size over a whole run."""
