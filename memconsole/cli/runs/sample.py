"""`memconsole sample`: continue a prompt, or answer a record or a message, with a run's model."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import click
from click.core import ParameterSource

from memconsole.cli.completing import run_names
from memconsole.cli.options import Number, checkpoint_option, device_option
from memconsole.cli.runs.program import run_on_terminal, run_program
from memconsole.runs.record.run_store import find_run

STANDARD_INPUT = "-"
Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def sampling_options(temperature: str, tokens: str) -> Decorator:
    """A decorator that adds the options that all kinds of sampling share. `temperature` and `tokens`
    say in words what a command takes where the user gives none."""
    options = (
        click.option("--seed", default=0, show_default=True, type=click.IntRange(0)),
        click.option(
            "--top-p",
            default=1.0,
            show_default=True,
            type=Number(0.0, 1.0, min_open=True),
            help="Draw from the fewest tokens that are together this likely.",
        ),
        click.option("--top-k", default=50, show_default=True, type=click.IntRange(0)),
        click.option(
            "--temperature",
            type=Number(0.0, 10.0),
            help=f"Default: {temperature}.",
        ),
        click.option(
            "--tokens",
            type=click.IntRange(1, 4096),
            help=f"Most tokens to draw. Default: {tokens}.",
        ),
    )
    return lambda command: functools.reduce(lambda made, option: option(made), options, command)


def tell_unused(ctx: click.Context) -> None:
    """Say which given options change nothing, because answers take the likeliest token unless a temperature is given."""
    given = [
        f"--{name.replace('_', '-')}"
        for name in ("seed", "top_k", "top_p")
        if ctx.get_parameter_source(name) is not ParameterSource.DEFAULT
    ]
    if given and ctx.params["temperature"] is None:
        click.echo(
            f"{', '.join(given)}: not used, because answers take the likeliest token; --temperature 0.8 draws them",
            err=True,
        )


@click.command()
@click.argument("run", default="latest", shell_complete=run_names)
@click.option(
    "--prompt",
    default="",
    help="What to continue; nothing starts a new document, - reads it from standard input.",
)
@click.option(
    "--record",
    "fields",
    multiple=True,
    metavar="FIELD=VALUE",
    help="A field of the record to answer, for runs with data.template; with --message, what its chat has besides: "
    "system, tools or chat_template_kwargs.",
)
@click.option(
    "--message",
    metavar="TEXT",
    help="A user's message to answer, for runs on chats; - reads it from standard input.",
)
@sampling_options(
    temperature="0.8; 0 for answers to a record or a message, which takes the likeliest token",
    tokens="64; 256 for an answer",
)
@checkpoint_option
@device_option
@click.pass_context
def command(
    ctx: click.Context,
    /,
    run: str,
    prompt: str,
    fields: tuple[str, ...],
    message: str | None,
    **sampling: object,
) -> None:
    """Continue a prompt with the model of RUN, or answer a record or a message."""
    if prompt and (fields or message):
        ctx.fail("give --prompt, or --record and --message")
    found = find_run(run)
    if fields or message is not None:
        tell_unused(ctx)
    options = {"prompt": prompt, "message": message, **sampling}
    arguments = [
        f"--{name.replace('_', '-')}={value}"
        for name, value in options.items()
        if value is not None
    ]
    arguments += [f"--record={field}" for field in fields]
    if sys.stdout.isatty():
        ctx.exit(run_on_terminal("sample", found, arguments))
    ctx.exit(
        run_program("sample", found, arguments, reads_input=STANDARD_INPUT in (prompt, message))
    )
