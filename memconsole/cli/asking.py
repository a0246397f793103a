"""Questions that a person answers with yes or no."""

from __future__ import annotations

import sys

import click

from memconsole.errors import UserError


def ask(question: str) -> None:
    """Ask `question`. Raises `click.Abort` if the answer is no, and `UserError` where nobody can answer."""
    try:
        agreed = click.confirm(question)
    except click.Abort:
        if sys.stdin.isatty():
            raise
        click.echo(err=True)
        raise UserError("there was no answer; with --yes no question is asked") from None
    if not agreed:
        raise click.Abort
