"""Errors that the user can fix: the message is one line that tells the user what to change."""


class UserError(Exception):
    """The message says what is wrong, where, and what is allowed. Commands exit with `exit_code`."""

    exit_code = 2


class FileError(UserError):
    """A file or a folder that cannot be used, where no closer words were found."""

    exit_code = 1

    def __init__(self, error: OSError) -> None:
        """`error` names the file."""
        super().__init__(f"{error.filename}: {error.strerror or type(error).__name__}")
