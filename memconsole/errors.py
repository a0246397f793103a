"""Errors that the user can fix: the message is one line that tells the user what to change."""


class UserError(Exception):
    """The message says what is wrong, where, and what is allowed. Commands exit with `exit_code`."""

    exit_code = 2
