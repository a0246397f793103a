"""Commands about data: looked into, measured, made."""
