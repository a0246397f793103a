"""Which names a run can have: no word that commands read as another run, and no other run's name."""

from __future__ import annotations

from collections.abc import Mapping

from memconsole.runs.record import labels
from memconsole.runs.record.directory import LATEST, RUN_ID, RunDirectory, RunError, list_runs


def check_name(name: str) -> None:
    """Raise `RunError` if commands read `name` as the newest run or as an id."""
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
