"""Which names a run can have: no word that commands read as another run or as an option, and no other run's name."""

from __future__ import annotations

from collections.abc import Mapping

from memconsole.runs.record import labels
from memconsole.runs.record.directory import RunDirectory, RunError
from memconsole.runs.record.labels import NAME_CHARACTERS
from memconsole.runs.record.run_store import LATEST, RUN_ID, list_runs
from memconsole.sanitize import clean_line


def check_name(name: str) -> None:
    """Raise `RunError` if commands read `name` as the newest run, as an id or as an option, or if it is nothing but
    dots."""
    if name.startswith("-") or (name and not name.strip(".")):
        raise RunError(
            f'the name "{clean_line(name, NAME_CHARACTERS)}" begins with - or has only dots; expected another name'
        )
    if name == LATEST or RUN_ID.fullmatch(name):
        what = "the newest run" if name == LATEST else "the run that has this id"
        raise RunError(f'the name "{name}" stands for {what}; expected another name')


def rename_run(run: RunDirectory, name: str, environment: Mapping[str, str]) -> str:
    """`labels.rename`, unless the name is reserved or another run has it. Raises `RunError` too."""
    shown = labels.shown_name(name, environment)
    check_name(shown)
    for other in list_runs():
        if other != run and other.name == shown:
            raise RunError(
                f'run {other.id} has the name "{shown}"; expected a name that no run has'
            )
    return labels.rename(run.path, name, environment)
