"""One screen per file; each is imported by the action that opens it."""
