"""Runs one of Slurm's commands (`sbatch`, `squeue`, `sinfo` …) with a time limit."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence

from memconsole.sanitize import clean_line


class SlurmError(Exception):
    """A command of Slurm gave no answer; the message says why."""


class NotInstalled(SlurmError):
    """This machine has no such command."""


class Refused(SlurmError):
    """The command failed; the message is the last line that it printed."""


def output_of(
    command: Sequence[str], limit_seconds: float, environment: Mapping[str, str] = os.environ
) -> str:
    """What a command of Slurm prints. Raises `SlurmError`."""
    name = command[0]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=limit_seconds,
            check=False,
            env=environment,
        )
    except FileNotFoundError:
        raise NotInstalled(f"there is no {name} here") from None
    except subprocess.TimeoutExpired:
        raise SlurmError(f"{name} does not answer within {limit_seconds:.0f} seconds") from None
    except OSError as error:
        raise SlurmError(f"{name}: {error.strerror}") from None
    if done.returncode != 0:
        lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
        raise Refused(clean_line(lines[-1], 200) if lines else f"exit code {done.returncode}")
    return done.stdout.decode("utf-8", "replace")
