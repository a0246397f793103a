"""The trainer's side of an attempt: what its processes record, and the requests that they obey."""
