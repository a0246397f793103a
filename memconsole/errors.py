"""What a person can mend: errors whose message is one line for whoever asked."""


class UserError(Exception):
    """The message says what, where and what is allowed; commands print it and end with exit code 2."""
