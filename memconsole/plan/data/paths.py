"""The settings that name files or folders, and the folder that their relative paths start from."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from memconsole.plan import catalog, plan_file
from memconsole.plan.catalog.sources import HUB_PREFIX, not_made
from memconsole.plan.data.mixture import MIX, VALIDATION, sources, validates_on_split
from memconsole.plan.models.finding import is_hub_id
from memconsole.plan.plan import Plan, PlanError, get, quote, replace
from memconsole.plan.templates.choice import TEMPLATE_SUFFIXES
from memconsole.plan.training.origin import RANDOM, checkpoint_of

FILES = (
    "data.source",
    VALIDATION,
    "data.template",
    "data.tokenizer",
    "model.name",
    "model.decoder",
    "model.weights",
)
"""The settings that may name a file or a folder."""
Place = Callable[[str, Path], str]
"""The value of a setting whose paths start from a folder."""


def load(file: Path) -> Plan:
    """Read a plan file; ``~`` is a home directory. Its relative paths start from its own folder.

    Raises `PlanError`, also when the file cannot be read, or is empty, as a command that failed leaves it.
    """
    text = plan_file.text_of(file)
    if not text.strip():
        raise PlanError(f'{file}: is empty; expected settings, such as backend = "torch"')
    plan = plan_file.loads(text, str(file))
    folder = file.expanduser().parent
    return plan if folder == Path() else _in_folder(plan, folder.absolute(), _source)


def current_folder() -> Path:
    """The folder that relative paths begin at. Raises `PlanError` if it was deleted."""
    try:
        return Path.cwd()
    except OSError:
        raise PlanError("the current folder is gone: change to one that exists") from None


def absolute(plan: Plan) -> Plan:
    """`plan` with absolute paths, for a plan file in any folder. Names of the catalog stay. Raises `PlanError`."""
    return _in_folder(plan, current_folder(), _source)


def with_absolute_model(plan: Plan) -> Plan:
    """`plan` with absolute paths of its model, weights and tokenizer, as a run keeps them. Cheap for a catalog model; the
    same plan if the current folder was deleted."""
    places: dict[str, Place] = {
        "data.tokenizer": _path,
        "model.name": _model,
        "model.decoder": _model,
        "model.weights": _weights,
    }
    given = {
        key: text for key in places if (text := get(plan, key)) and text not in catalog.models()
    }
    if not given:
        return plan
    try:
        folder = current_folder()
    except PlanError:
        return plan
    return replace(plan, {key: places[key](text, folder) for key, text in given.items()})


def anywhere(plan: Plan) -> Plan:
    """`plan` for a process in another folder: with absolute paths, also for the catalog's files of this folder.

    Raises `PlanError`, also if such a file has not been made.
    """
    check_made(plan)
    moved = located(plan)
    checkpoint = checkpoint_of(moved)
    if checkpoint is None:
        return moved
    return replace(
        moved, {"model.weights": str(checkpoint.resolve())}
    )  # `best` is a link that moves on


def located(plan: Plan) -> Plan:
    """`plan` with absolute paths, also for the catalog's files of this folder, which need not be there. Raises `PlanError`."""
    return _in_folder(plan, current_folder(), _made_source)


def check_made(plan: Plan) -> None:
    """Raise `PlanError` if the plan reads a file of the catalog that is not in this folder."""
    for one in sources(plan):
        entry = catalog.dataset(one)
        if entry.kind == "made":
            raise not_made(entry)


def _in_folder(plan: Plan, folder: Path, source: Place) -> Plan:
    """`plan` with its relative paths in `folder`, an absolute path."""
    places: dict[str, Place] = {
        "data.source": source,
        VALIDATION: _split if validates_on_split(plan) else source,
        MIX: partial(_mix, source),
        "data.template": _template,
        "data.tokenizer": _path,
        "model.name": _model,
        "model.decoder": _model,
        "model.weights": _weights,
    }
    given = {key: get(plan, key) for key in places}
    return replace(plan, {key: text and places[key](text, folder) for key, text in given.items()})


def _path(text: str, folder: Path) -> str:
    return str(folder / os.path.expanduser(text))


def _source(text: str, folder: Path) -> str:
    known = text in catalog.datasets() or text.startswith(HUB_PREFIX)
    return text if known or not text else _path(text, folder)


def _made_source(text: str, folder: Path) -> str:
    entry = catalog.datasets().get(text)
    if entry is not None and entry.kind == "made":
        return _path(entry.where, folder)
    return _source(text, folder)


def _split(text: str, folder: Path) -> str:
    return text


def _mix(source: Place, text: str, folder: Path) -> str:
    moved_words = []
    for word in text.split(","):
        name, equals, share = word.strip().rpartition("=")
        moved = source(name.strip(), folder)
        if "," in moved:
            reason = f"the comma in {quote(moved)} would separate two sources; rename its folder"
            raise PlanError(f"{MIX} = {quote(text)}: {reason}", MIX)
        moved_words.append(f"{moved}{equals}{share}")
    return ", ".join(moved_words)


def _template(text: str, folder: Path) -> str:
    return _path(text, folder) if Path(text).suffix in TEMPLATE_SUFFIXES else text


def _model(text: str, folder: Path) -> str:
    path = _path(text, folder)
    named = text in catalog.models() or (is_hub_id(text) and not os.path.isdir(path))
    return text if named else path


def _weights(text: str, folder: Path) -> str:
    return text if text == RANDOM else _path(text, folder)
