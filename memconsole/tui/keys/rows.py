"""The one key table. Bindings, footer, help screen and command palette are all made from it.

`KeyTable` is this table with the keys of the user's keymap file; the app uses that one. Plain
letters can be bound because nothing on the main screens takes text. On screens that do (a picker, a
prompt), only keys that type no text are bound. `RESERVED` are the keys that terminals, tmux,
screen, byobu or VS Code keep for themselves; a test checks that the table has none of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from memconsole.plan.toggles.optimizations import OPTIMIZATIONS
from memconsole.tui.keys.names import printed

if TYPE_CHECKING:
    from textual.binding import BindingType

RESERVED = frozenset(
    {"ctrl+i", "ctrl+m", "ctrl+h", "ctrl+j", "ctrl+a", "ctrl+b", "ctrl+p", "ctrl+s"}
    | {"ctrl+left_square_bracket"}
    | {f"f{n}" for n in range(1, 25)}
)
"""Keys that plain terminals cannot tell apart, or that terminals and multiplexers intercept."""

EXCLUDING = (frozenset({"going", "paused"}), frozenset({"out_of_memory", "symptom"}))
"""Conditions that never hold together, so their rows may share a key."""

MAIN = ("plan", "run", "runs", "devices")
MODAL = ("pick", "prompt", "launch", "confirm", "help", "command", "compare", "plans")
ALL_SCREENS = (*MAIN, *MODAL)
TYPING = ("pick", "prompt", "launch")
"""Screens with a text input. Keys that type or edit text do nothing else there."""
SCROLLED = ("plan", "runs", "devices", "pick", "help", "command", "run", "compare", "plans")
ENDED = tuple(screen for screen in SCROLLED if screen not in TYPING)
"""Screens on which keys move to the first and the last row. Where text is typed, these keys edit the text."""


@dataclass(frozen=True, kw_only=True)
class Key:
    """One row: which keys do what, on which screens, and when."""

    id: str
    keys: str
    """Textual's names, comma separated. The first one is shown."""
    action: str
    label: str
    """One or two words for the footer."""
    help: str
    """One sentence for the help screen and the palette."""
    screens: tuple[str, ...]
    when: str = ""
    """A condition of the screen (`ConsoleScreen.conditions`) that must hold; "" means always."""
    footer: bool = False
    footer_when: str = ""
    """A condition that must hold for the footer to show it, as in `when`."""
    writes: bool = False
    """Changes a run or a file, or starts a process: not offered in a read-only console."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.keys.split(","))

    @property
    def shown(self) -> str:
        """The key as the footer and the lists print it."""
        return printed(self.names[0])

    @property
    def all_shown(self) -> str:
        """All keys, as the help prints them."""
        return " or ".join(printed(name) for name in self.names)


def _toggle_rows() -> tuple[Key, ...]:
    return tuple(
        Key(
            id=f"toggle-{row.key}",
            keys=row.keyboard,
            action=f"step_row({row.key!r})",
            label=row.label,
            help=f"Next value of {row.label}.",
            screens=("plan",),
        )
        for row in OPTIMIZATIONS
    )


KEYS: tuple[Key, ...] = (
    # Plan
    Key(id="launch", keys="l", action="launch", label="launch", screens=("plan",),
        help="Launch this plan: asks for a name and shows what will run, then watches it.", footer=True, writes=True),
    Key(id="fit", keys="f", action="fit", label="fit", screens=("plan",),
        help="The fastest settings that fit the device; pinned ones stay.", footer=True),
    Key(id="model", keys="m", action="pick_model", label="model", screens=("plan",),
        help="Choose the model: a catalog name, a directory or a hub id.", footer=True),
    Key(id="data", keys="d", action="pick_data", label="data", screens=("plan",),
        help="Choose the dataset: a catalog name, a path, hf://owner/name or *.h5.", footer=True),
    Key(id="device", keys="v", action="pick_device", label="device", screens=("plan",),
        help="Choose the device: one of this machine, a Slurm partition, or any of the catalog.", footer=True),
    Key(id="backend", keys="e", action="pick_backend", label="backend",
        screens=("plan",), help="Choose the backend (engine) that trains.", footer=True),
    Key(id="settings", keys="s", action="settings", label="settings",
        screens=("plan",), help="Every setting of the plan file: find one, change it.", footer=True),
    Key(id="toggle", keys="space,enter", action="step(1)", label="toggle",
        screens=("plan",), help="Next value of the selected optimization.", footer=True),
    Key(id="forward", keys="right", action="step(1)", label="next value",
        screens=("plan",), help="Next value of the selected optimization."),
    Key(id="back", keys="left", action="step(-1)", label="previous value",
        screens=("plan",), help="Previous value of the selected optimization."),
    Key(id="undo", keys="u", action="undo", label="undo", screens=("plan",),
        help="Undo the last change of the plan.", when="undo", footer=True),
    Key(id="redo", keys="y", action="redo", label="redo", screens=("plan",),
        help="Redo what was undone.", when="redo"),
    Key(id="presets", keys="n", action="pick_preset", label="preset",
        screens=("plan",), help="Start anew from a preset: a first run, a task with its data, or a kind of machine."),
    Key(id="save", keys="w", action="save", label="save", screens=("plan",),
        help="Write the plan to a TOML file.", writes=True),
    Key(id="load", keys="o", action="load", label="open", screens=("plan",),
        help="Open a plan file."),
    Key(id="exact", keys="r", action="exact", label="exact", screens=("plan",),
        help="Ask for traced or compiled numbers now, or stop asking for them.", writes=True),
    Key(id="pin", keys="k", action="pin", label="keep", screens=("plan",),
        help="Pin the selected optimization (*): fitting leaves it as it is; again lets go."),
    Key(id="largest-batch", keys="B", action="largest_batch", label="largest batch",
        screens=("plan",), help="The largest micro-batch that fits."),
    Key(id="largest-length", keys="X", action="largest_length", label="longest rows",
        screens=("plan",), help="The largest sequence length that fits."),
    Key(id="command", keys="c", action="command", label="command", screens=("plan",),
        help="The equivalent command line and plan file, to copy."),
    Key(id="compare-plans", keys="C", action="compare", label="compare plans",
        screens=("plan",), help="Put this plan beside another: an earlier state, a preset, a run's, a file."),
    *_toggle_rows(),
    # Run
    Key(id="stop", keys="s", action="stop", label="stop", screens=("run",),
        help="Stop the run; asks first: checkpoint and stop, or kill.", when="live",
        footer=True, writes=True),
    Key(id="pause", keys="space", action="pause", label="pause", screens=("run",),
        help="Pause after the current step; memory stays allocated.", when="going", footer=True,
        writes=True),
    Key(id="continue", keys="space", action="continue", label="go on",
        screens=("run",), help="Let a paused run go on.", when="paused", footer=True, writes=True),
    Key(id="resume", keys="r", action="resume", label="resume", screens=("run", "runs"),
        help="Continue the run from its last checkpoint.", when="resumable", footer=True,
        writes=True),
    Key(id="remedies", keys="f", action="remedies", label="remedies", screens=("run",),
        help="What would have saved this run from running out of memory; pick one to relaunch with it.",
        when="out_of_memory", footer=True, writes=True),
    Key(id="helps", keys="f", action="helps", label="what helps", screens=("run",),
        help="Settings that act on what goes wrong in this run; pick one to open the plan with it.",
        when="symptom", footer=True),
    Key(id="edit", keys="e", action="edit", label="edit plan", screens=("run", "runs"),
        help="Take this run's plan to the plan screen, to change and launch again.", when="run", footer=True,
        footer_when="failed"),
    Key(id="pane", keys="o", action="pane", label="next pane",
        screens=("run",), help="Switch the lower pane: output, sample text, summary, closed.", footer=True),
    Key(id="older-sample", keys="left", action="sample(-1)", label="older",
        screens=("run",), help="The sampled text of the evaluation before.", when="samples", footer=True),
    Key(id="newer-sample", keys="right", action="sample(1)", label="newer",
        screens=("run",), help="The sampled text of the next evaluation.", when="samples", footer=True),
    Key(id="next-chart", keys="n,tab", action="chart(1)", label="next chart",
        screens=("run",), help="Make the next logged series the large chart: loss, measures, gradient norm, speed, rate, memory.",
        footer=True),
    Key(id="previous-chart", keys="N,shift+tab", action="chart(-1)", label="chart before",
        screens=("run",), help="Make the series before it the large chart."),
    Key(id="logarithm", keys="y", action="logarithm", label="log scale",
        screens=("run",), help="Logarithmic or linear axis of the large chart.", footer=True),
    Key(id="zoom", keys="z", action="zoom", label="recent", screens=("run",),
        help="The last steps at full resolution, or the whole run.", footer=True),
    Key(id="glyphs", keys="k", action="glyphs", label="dots", screens=("run",),
        help="Draw the curve with braille, blocks or ASCII: whichever the font has."),
    # Lists
    Key(id="compare-runs", keys="c", action="compare", label="compare",
        screens=("runs",), help="The marked runs side by side: curves, figures, settings.",
        when="comparable", footer=True),
    Key(id="open", keys="enter", action="open", label="watch", screens=("runs",),
        help="Watch the selected run.", when="run", footer=True),
    Key(id="filter", keys="slash", action="filter", label="filter", screens=("runs",),
        help="Only runs that hold every typed word: name, state, model, backend, tag, note.", footer=True),
    Key(id="mark", keys="space", action="mark", label="mark", screens=("runs",),
        help="Mark the selected run for comparing, or unmark it.", when="run", footer=True),
    Key(id="delete", keys="D", action="delete", label="delete", screens=("runs",),
        help="Delete the selected run's files, checkpoints included; asks first.",
        when="deletable", footer=True, writes=True),
    Key(id="rename", keys="n", action="rename", label="rename", screens=("runs",),
        help="Give the selected run another name; it may be training.", when="run", footer=True,
        writes=True),
    Key(id="tags", keys="number_sign", action="tags", label="tags", screens=("runs",),
        help="Change the selected run's tags.", when="run", writes=True),
    Key(id="note", keys="N", action="note", label="note", screens=("runs",),
        help="Write or change the selected run's note.", when="run", writes=True),
    Key(id="compare-logarithm", keys="y", action="logarithm", label="log scale",
        screens=("compare",), help="Logarithmic or linear loss axis.", footer=True),
    Key(id="other-loss", keys="o", action="other_loss", label="train/validation",
        screens=("compare",), help="Train or validation loss.", footer=True),
    Key(id="up", keys="up", action="move(-1)", label="up",
        screens=SCROLLED,
        help="Move up."),
    Key(id="down", keys="down", action="move(1)", label="down",
        screens=SCROLLED,
        help="Move down."),
    Key(id="page-up", keys="pageup", action="move(-10)", label="page up",
        screens=SCROLLED,
        help="Move up by ten rows."),
    Key(id="page-down", keys="pagedown", action="move(10)", label="page down",
        screens=SCROLLED,
        help="Move down by ten rows."),
    Key(id="first", keys="home", action="move(-1000000)", label="first row",
        screens=ENDED, help="Move to the first row."),
    Key(id="last", keys="end", action="move(1000000)", label="last row",
        screens=ENDED, help="Move to the last row."),
    # Between screens
    Key(id="plan", keys="p", action="app.show_plan", label="plan",
        screens=("run", "runs", "devices"), help="The plan screen.", footer=True),
    Key(id="training", keys="t", action="app.show_run", label="run",
        screens=("plan", "runs", "devices"), help="The run being watched.", when="attached",
        footer=True),
    Key(id="runs", keys="a", action="app.show_runs", label="all runs",
        screens=("plan", "run", "devices"), help="All runs, live first.", footer=True),
    Key(id="devices", keys="g", action="app.show_devices", label="devices",
        screens=("plan", "run", "runs"), help="Every device and how full it is.", footer=True),
    Key(id="palette", keys="colon", action="app.palette", label="actions",
        screens=MAIN, help="Find any action of this screen by its name."),
    Key(id="help", keys="question_mark,h", action="app.help", label="help",
        screens=(*MAIN, "compare", "plans"), help="This list of keys.", footer=True),
    # Modal screens
    Key(id="accept", keys="enter", action="accept", label="accept",
        screens=("pick", "prompt", "launch", "plans"), help="Take it.", footer=True),
    Key(id="complete", keys="tab", action="complete", label="complete the path",
        screens=("pick", "prompt"), help="Complete the path that is being typed.", when="paths", footer=True),
    Key(id="later", keys="tab", action="later", label="start later",
        screens=("launch",), help="Start the run now, or after a run that is live has ended.", when="others run", footer=True),
    Key(id="stop-now", keys="s", action="choose('stop')", label="",
        screens=("confirm",), help="Save a checkpoint and stop.", when="stop"),
    Key(id="kill-now", keys="k", action="choose('kill')", label="",
        screens=("confirm",), help="End the run at once.", when="kill"),
    Key(id="delete-now", keys="d", action="choose('delete')", label="",
        screens=("confirm",), help="Delete it for good.", when="delete"),
    Key(id="launch-now", keys="l", action="choose('launch')", label="",
        screens=("confirm",), help="Launch it anyway.", when="launch"),
    Key(id="copy", keys="y", action="copy", label="copy", screens=("command",),
        help="Copy by the terminal (OSC 52) and write to a file.", footer=True),
    Key(id="dismiss", keys="escape", action="back", label="back",
        screens=(*MODAL, "runs", "devices"), help="Back, changing nothing.", footer=True),
    Key(id="go-back", keys="escape", action="app.go_back", label="back", screens=("plan", "run"),
        help="Back to the screen you came from.", when="came", footer=True),
    # Everywhere
    Key(id="theme", keys="T", action="app.theme", label="colours", screens=MAIN,
        help="Dark, light, or the terminal's own colours. The choice is remembered."),
    Key(id="mouse", keys="ctrl+t", action="app.mouse", label="mouse", screens=MAIN,
        help="Take clicks and the wheel, or leave the mouse to the terminal to select text. Remembered."),
    Key(id="repaint", keys="ctrl+l", action="app.repaint", label="repaint",
        screens=(*MAIN, *MODAL), help="Paint the whole screen again."),
    Key(id="background", keys="ctrl+z", action="app.background", label="background",
        screens=(*MAIN, *MODAL), help="Back to the shell until fg; runs go on training."),
    Key(id="leave", keys="q", action="app.leave", label="quit", screens=MAIN,
        help="Leave the console; runs go on training.", footer=True),
    Key(id="leave-anywhere", keys="ctrl+q,ctrl+c", action="app.leave",
        label="quit", screens=(*MAIN, *MODAL), help="Leave from anywhere; runs go on training."),
)  # fmt: skip
"""Every key of the console."""


def for_screen(screen: str) -> tuple[Key, ...]:
    """The rows that act on `screen`, in table order."""
    return tuple(key for key in KEYS if screen in key.screens)


def bindings(screen: str) -> list[BindingType]:
    """Textual's bindings for `screen`. A `KeyTable` changes their keys by binding id."""
    from textual.binding import Binding

    return [
        Binding(key.keys, key.action, key.label, show=False, id=f"{screen}.{key.id}")
        for key in for_screen(screen)
    ]
