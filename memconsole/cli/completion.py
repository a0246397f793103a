"""`memconsole completion`: the script that lets a shell complete commands, keys and runs."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from memconsole.cli.completing import VARIABLE
from memconsole.cli.shells import add_shells


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def command(ctx: click.Context, shell: str) -> None:
    """Print the completion script of SHELL. To have it in each new shell:

    \b
    bash  echo 'eval "$(memconsole completion bash)"' >> ~/.bashrc
    zsh   echo 'eval "$(memconsole completion zsh)"' >> ~/.zshrc
    fish  memconsole completion fish > ~/.config/fish/completions/memconsole.fish
    """
    add_shells()
    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(ctx.find_root().command, {}, "memconsole", VARIABLE).source())
