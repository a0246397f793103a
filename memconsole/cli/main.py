"""The `memconsole` command: opens the console, or runs one of its subcommands."""

from __future__ import annotations

import importlib
import io
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

import click
from click.shell_completion import CompletionItem

from memconsole.cli import output
from memconsole.cli.completing import VARIABLE
from memconsole.cli.options import plan_options
from memconsole.errors import FileError, UserError
from memconsole.sanitize import clean, clean_line

COMMANDS = {
    "plan": "the memory table, per-toggle savings, fits or not",
    "fit": "the fastest settings that fit; the largest batch and sequence, the smallest device",
    "train": "train without the console: progress lines and a final summary",
    "runs": "list runs, live first",
    "attach": "watch a run in the console",
    "web": "the same console in a browser, on the loopback",
    "stop": "checkpoint a run and stop it, resumable",
    "pause": "pause a run between two steps; its memory stays allocated",
    "profile": "record a few steps of a running run: trace and memory",
    "resume": "continue a paused run, or a stopped or failed one from its last checkpoint",
    "logs": "a run's output",
    "report": "a run's figures: losses, epochs, memory estimated and measured",
    "compare": "runs side by side",
    "sample": "a prompt continued, or a record answered, by a run's model",
    "chat": "a conversation with a run's model",
    "predict": "what a run's recommender or regressor predicts for new data",
    "export": "a run's weights as a directory that transformers or torch loads",
    "export-job": "a plan as a job file of SkyPilot or Kubernetes",
    "devices": "devices and how full they are",
    "data": "look into a dataset, or make one",
    "keys": "the console's keys as a keymap file, to change and keep",
    "doctor": "what works here and what does not",
    "completion": "the script that lets bash, zsh or fish complete commands, keys and runs",
}
ROOMS = {
    "plans": "plan fit",
    "runs": "train runs attach stop pause profile resume logs report compare sample chat predict export export-job",
    "machine": "devices doctor",
    "data": "data",
}
"""Commands by folder. Each is `memconsole.cli.<folder>.<name>.command`, imported only on use."""


class LazyGroup(click.Group):
    """A group that imports a subcommand only to run it, so that ``--help`` is instant."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        folder = next(
            (f"{room}." for room, names in ROOMS.items() if cmd_name in names.split()), ""
        )
        command = importlib.import_module(
            f"memconsole.cli.{folder}{cmd_name.replace('-', '_')}"
        ).command
        assert isinstance(command, click.Command)
        return command

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """The commands, without importing them."""
        commands = [
            CompletionItem(name, help=words)
            for name, words in COMMANDS.items()
            if name.startswith(incomplete)
        ]
        return [*commands, *click.Command.shell_complete(self, ctx, incomplete)]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command. It is done if the reader of its output, such as `head`, wants no more."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:
            if not output.failed(error):
                raise
            output.give_up()
            ctx.exit()

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            from memconsole.plan.plan import nearest

            ctx.fail(f'no command "{clean_line(args[0], 80)}"{nearest(args[0], COMMANDS)}')
        return super().resolve_command(ctx, args)


@click.group(
    cls=LazyGroup,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(package_name="memconsole")
@plan_options
@click.option("--readonly", is_flag=True, help="Look only: no launch, stop, resume or delete.")
@click.option("--ascii", is_flag=True, help="Draw with ASCII only.")
@click.option("--slow-link/--fast-link", default=None, help="Fewer bytes; automatic over SSH.")
@click.pass_context
def cli(
    ctx: click.Context,
    preset: str | None,
    plan_file: Path | None,
    assignments: tuple[str, ...],
    source: str | None,
    readonly: bool,
    ascii: bool,
    slow_link: bool | None,
) -> None:
    """Estimate, launch and watch memory-lean training runs.

    Without a command: opens the console, on the plan the options describe; where standard input or output
    is not a terminal, trains that plan with plain progress lines.
    """
    named = bool(preset or plan_file or assignments or source)
    fast = {True: "--slow-link", False: "--fast-link", None: ""}[slow_link]
    options = ("--readonly" * readonly, "--ascii" * ascii, fast)
    of_console = [option for option in options if option]
    if ctx.invoked_subcommand is not None:
        if named:
            ctx.fail(f"--preset, --plan, --from and --set go after {ctx.invoked_subcommand}")
        given = {"readonly": readonly, "ascii": ascii, "slow_link": slow_link}
        if of_console and ctx.invoked_subcommand != "attach":
            ctx.fail(
                f"{of_console[0]} is for the console and for attach, not for {ctx.invoked_subcommand}"
            )
        ctx.default_map = {"attach": given}
        return
    from memconsole.cli.options import build_plan

    plan = build_plan(preset, plan_file, assignments, source, wait=False)
    if sys.stdin.isatty() and sys.stdout.isatty():
        from memconsole.tui.app.console import run_console

        ctx.exit(
            run_console(
                plan if named else None, readonly=readonly, ascii=ascii, slow_link=slow_link
            )
        )
    if of_console:
        ctx.fail(
            f"{of_console[0]} opens the console; expected a terminal as standard input and output"
        )
    from memconsole.cli.runs.train import train_in_foreground

    ctx.exit(train_in_foreground(plan, name=None, json=False))


def main() -> Any:
    """Entry point. Prints a user's error as one line on standard error and exits with its code.

    What was typed may hold control characters; error messages show them escaped. Files follow the
    umask, but are never writable for others.
    """
    os.umask(os.umask(0o077) | 0o022)
    output.open_closed()
    if VARIABLE in os.environ:
        from memconsole.cli.shells import add_shells

        add_shells()
    try:
        code = cli.main(prog_name="memconsole", standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except click.ClickException as error:
        said = io.StringIO()
        error.show(said)
        click.echo(clean(said.getvalue()), err=True, nl=False)
        sys.exit(error.exit_code)
    except click.Abort:
        click.echo("Aborted!", err=True)
        sys.exit(1)
    except UserError as error:
        _end(error)
    except OSError as error:
        if output.failed(error):
            _end(output.OutputError(error))
        if not error.filename:
            raise
        _end(FileError(error))


def _end(error: UserError) -> NoReturn:
    click.echo(f"memconsole: {clean(str(error))}", err=True)
    sys.exit(error.exit_code)
