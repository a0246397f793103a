"""The plan: what a person picked, what can be picked, and the catalogs it is picked from."""
