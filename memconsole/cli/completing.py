"""What the shell completes: commands, presets, keys and their values, runs and checkpoints."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import click
from click.shell_completion import CompletionItem

from memconsole.path_completion import completions, looks_like_path

VARIABLE = "_MEMCONSOLE_COMPLETE"
"""Set by the shell's script to ask for completions."""
_UNQUOTED = re.compile(r"[\w.,+@%~/-]+")
"""A path that a shell reads as it is."""
MOST = 200
"""How many runs or tags are offered."""


def run_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Runs, newest first: by name where that is one word, else by id."""
    from memconsole.runs.record.directory import RunError
    from memconsole.runs.record.run_store import list_runs

    try:
        runs = list_runs()
    except (RunError, OSError):
        return []
    words: dict[str, str] = {"latest": "the newest run"}
    for run in runs:
        name = run.name
        by_name = re.fullmatch(r"[\w.@+-]+", name) and not incomplete[:1].isdigit()
        word, about = (name, run.id) if by_name else (run.id, name)
        if word.startswith(incomplete):
            words.setdefault(word, about)
        if len(words) > MOST:
            break
    return _items(words.items(), incomplete)


def runs_or_files(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Runs, and what the shell itself finds of files."""
    return [*run_names(ctx, param, incomplete), CompletionItem(incomplete, type="file")]


def sources(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The datasets of the catalog, and what the shell itself finds of files."""
    from memconsole.plan import catalog

    named = ((name, entry.label) for name, entry in catalog.datasets().items())
    return [*_items(named, incomplete), CompletionItem(incomplete, type="file")]


def presets(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from memconsole.plan import catalog

    found = catalog.presets()
    return _items(((name, getattr(p, "label", "")) for name, p in found.items()), incomplete)


def assignments(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Keys of the plan as `key=`, and after it the values that it may have, or the path that is typed."""
    from memconsole.plan import plan as plans
    from memconsole.plan.data.paths import FILES

    key, assigned, value = incomplete.partition("=")
    if not assigned:
        return _items(((f"{s.key}=", s.help) for s in plans.SETTINGS.values()), incomplete)
    setting = plans.SETTINGS.get(key)
    if setting is None:
        return []
    if key in FILES and looks_like_path(value):
        found = (path for path in completions(value) if _UNQUOTED.fullmatch(path))
        return _items(((f"{key}={path}", "") for path in found), incomplete)
    return _items(((f"{key}={value}", words) for value, words in _values(setting)), incomplete)


def kept(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The settings that a search changes."""
    from memconsole.plan import plan as plans
    from memconsole.plan.toggles.optimizations import OPTIMIZATIONS

    keys = [key for row in OPTIMIZATIONS for key in row.settings]
    return _items(((key, plans.SETTINGS[key].help) for key in keys), incomplete)


def kinds(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The kinds of data that can be made."""
    from memconsole.plan.data.made import KINDS

    return _items(((kind.name, kind.help) for kind in KINDS), incomplete)


def tags(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The tags that runs have."""
    from memconsole.runs.record.directory import RunError
    from memconsole.runs.record.labels import read_labels
    from memconsole.runs.record.run_store import list_runs

    try:
        found = {tag for run in list_runs() for tag in read_labels(run.path).tags}
    except (RunError, OSError):
        return []
    return _items(((tag, "") for tag in sorted(found)), incomplete)[:MOST]


def checkpoints(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """best, last, and the steps that the run of this command has kept."""
    from memconsole.errors import UserError
    from memconsole.runs.record.checkpoints.manifest import step_of
    from memconsole.runs.record.run_store import find_run

    words = ["best", "last"]
    try:
        # Without the option's value the line cannot be parsed: its words are left over.
        named = next(iter(ctx.args), None) or ctx.params.get("run") or "latest"
        kept = find_run(str(named)).committed_checkpoints()
        words += [f"step-{step_of(path)}" for path in kept]
    except (UserError, OSError):
        pass
    return _items(((word, "") for word in words), incomplete)


def local_devices(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """The devices that a machine may have."""
    from memconsole.plan.catalog import LOCAL_DEVICES

    return _items(((name, "") for name in LOCAL_DEVICES), incomplete)


def _values(setting: Any) -> Iterator[tuple[str, str]]:
    from memconsole.plan import catalog

    if setting.key in ("model.name", "model.decoder"):
        yield from ((name, entry.label) for name, entry in catalog.models().items())
    elif setting.key == "data.source":
        yield from ((name, entry.label) for name, entry in catalog.datasets().items())
    elif setting.key == "device.name":
        yield from (("auto", "the best of this machine"), ("cpu", ""))
        yield from ((name, entry.label) for name, entry in catalog.devices().items())
    elif setting.holds is bool:
        yield from (("true", ""), ("false", ""))
    else:
        yield from ((value, "") for value in setting.choices)
    if setting.optional:
        yield "none", ""


def _items(words: Iterable[tuple[str, str]], incomplete: str) -> list[CompletionItem]:
    return [
        CompletionItem(word, help=about or None)
        for word, about in words
        if word.startswith(incomplete)
    ]
