"""Shows the plan as a command line and as a plan file, to copy."""

from __future__ import annotations

import shlex
from pathlib import Path

from textual.app import ComposeResult
from textual.containers import Vertical

from memconsole.plan import plan as plans
from memconsole.plan import plan_file
from memconsole.plan.data.paths import absolute
from memconsole.plan.plan import Plan, PlanError
from memconsole.tui.draw.lines import Line, Span, rule
from memconsole.tui.keys.rows import bindings
from memconsole.tui.screens.base import ConsoleModal
from memconsole.tui.widgets.text_lines import TextLines


def command_of(plan: Plan) -> str:
    """The shell command that trains `plan`."""
    return shlex.join(["memconsole", "train", *plans.command_line(plan)])


def pieces(text: str, width: int) -> list[str]:
    """A command broken before its ``--set`` options, with the shell's line continuation."""
    lines: list[str] = []
    line = ""
    for part in text.replace(" --set ", "\n--set ").split("\n"):
        if line and len(line) + len(part) + 3 > width:
            lines.append(line + " \\")
            line = "  " + part
        else:
            line = f"{line} {part}" if line else part
    return [*lines, line]


class CommandScreen(ConsoleModal, inherit_bindings=False):
    """Scrolls with the arrows; a key copies the command and writes it to a file."""

    SCREEN = "command"
    BINDINGS = bindings("command")

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self._plan = plan

    def compose_body(self) -> ComposeResult:
        with Vertical(id="body", classes="form"):
            yield TextLines(id="text")

    def draw_body(self) -> None:
        width = max(20, self.size.width - 4)
        lines: list[Line] = [rule("command line", width)]
        lines += [[Span(f" {part}")] for part in pieces(command_of(self._plan), width - 3)]
        lines += [
            [],
            rule(
                "plan file", width, f"{self.shown_key('save', 'plan')} on the plan screen saves it"
            ),
        ]
        try:
            text = plan_file.dumps(absolute(self._plan), full=False)
        except PlanError as error:
            lines.append([Span(f" {error}", "warn")])
        else:
            lines += [
                [Span(f" {row}", "title" if row.startswith("[") else "")]
                for row in text.splitlines()
            ]
        self.part(TextLines, "text").show(lines)

    def title_line(self) -> tuple[str, str]:
        return "the same without the console", ""

    def action_move(self, rows: int) -> None:
        self.part(TextLines, "text").scroll_by(rows)

    def action_copy(self) -> None:
        """Ask the terminal to copy, and also write a file: a terminal may ignore the request.

        A read-only console only asks.
        """
        from memconsole.runs.record.directory import RunError
        from memconsole.runs.record.files import write_atomic
        from memconsole.runs.record.run_store import make_runs_root

        text = command_of(self._plan)
        self.app.copy_to_clipboard(text)
        if self.console.readonly:
            self.notice("asked the terminal to copy", "good")
            return
        try:
            path: Path = make_runs_root().parent / "command.sh"
            write_atomic(path, f"{text}\n".encode())
        except (OSError, RunError) as error:
            self.notice(f"asked the terminal to copy; not written to a file: {error}", "warn")
        else:
            self.notice(f"asked the terminal to copy; also in {path}", "good")
