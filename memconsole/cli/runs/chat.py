"""`memconsole chat`: a conversation with a run's model."""

from __future__ import annotations

import click

from memconsole.cli.completing import run_names
from memconsole.cli.options import checkpoint_option, device_option
from memconsole.cli.runs.program import run_on_terminal
from memconsole.cli.runs.sample import sampling_options, tell_unused
from memconsole.runs.record.run_store import find_run


@click.command()
@click.argument("run", default="latest", shell_complete=run_names)
@click.option("--system", metavar="TEXT", help="A system message before the first one.")
@click.option(
    "--record",
    "fields",
    multiple=True,
    metavar="FIELD=VALUE",
    help="What the chat has besides its messages: tools or chat_template_kwargs, as JSON.",
)
@sampling_options(temperature="0, which takes the likeliest token", tokens="256")
@checkpoint_option
@device_option
@click.pass_context
def command(
    ctx: click.Context, /, run: str, system: str | None, fields: tuple[str, ...], **options: object
) -> None:
    """Talk with the model of RUN, which was trained on chats. Each line is a message, and /help lists the
    commands."""
    found = find_run(run)
    tell_unused(ctx)
    named = {"system": system, **options}
    arguments = [
        f"--{name.replace('_', '-')}={value}" for name, value in named.items() if value is not None
    ]
    arguments += [f"--record={field}" for field in fields]
    ctx.exit(run_on_terminal("chat", found, arguments))
