"""Specifications of the optimizations. Both backends implement them bit for bit."""
