"""`memconsole keys`: the console's keys, as a keymap file to start from."""

from __future__ import annotations

import click

from memconsole.sanitize import clean_line
from memconsole.tui.keys.keymap import dumps, read_keymap


@click.command()
def command() -> None:
    """Print every row of the key table with its present keys, as a keymap file.

    Keep what you want to change in $XDG_CONFIG_HOME/memconsole/keys.toml (by default under
    ~/.config). Rejected rows of that file are reported on standard error.
    """
    keymap = read_keymap()
    for problem in keymap.problems:
        click.echo(f"memconsole: {clean_line(str(keymap.path), 300)}: {problem}", err=True)
    click.echo(dumps(keymap.table))
