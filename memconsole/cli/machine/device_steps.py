"""Trains a few steps on each device that an installed backend can use, in a separate process each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator

from memconsole.devices.frameworks import framework_of
from memconsole.devices.reading import Devices
from memconsole.plan.plan import Plan, installed_backends, replace
from memconsole.runs.act.environment import trainer_environment
from memconsole.sanitize import clean_line

LIMIT_SECONDS = 180.0
"""A device whose steps take longer counts as one that does not answer."""

Finding = tuple[str, str, str]
"""What was tried; ok, warning or missing; what was found."""


def trials(devices: Devices) -> list[tuple[str, str]]:
    """Every backend with every device that it can use: with the CPU alone if its framework does not tell."""
    pairs = []
    for backend in installed_backends():
        framework = framework_of(backend)
        kinds = {"cpu"} if framework is None else framework.kinds
        pairs += [(backend, device.id) for device in devices.devices if device.kind in kinds]
    return pairs


def findings(backend: str, device: str) -> Iterator[Finding]:
    """What `memconsole_trainer.trial` finds out, as it finds it. Failures are findings."""
    plan = replace(Plan(), {"backend": backend, "device.name": device})
    environment = trainer_environment(plan, os.environ)
    argv = [sys.executable, "-P", "-m", "memconsole_trainer.trial", backend, device]
    try:
        done = subprocess.run(
            argv,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=LIMIT_SECONDS,
            check=False,
        )
        output, errors, ended = done.stdout, done.stderr, done.returncode
    except subprocess.TimeoutExpired as slow:
        output, errors, ended = slow.stdout or b"", b"", None
    state = ""
    for line in output.decode("utf-8", "replace").splitlines():
        try:
            finding = json.loads(line)
            state, words = finding["state"], clean_line(f"{finding['what']}: {finding['found']}")
            yield f"{backend} on {device}", state, words
        except (ValueError, KeyError, TypeError):
            continue
    if ended is None:
        yield f"{backend} on {device}", "missing", f"no answer within {LIMIT_SECONDS:.0f} s"
    elif ended not in (0, 1) or (ended == 1 and state != "missing"):  # a refusal ends with 1, too
        last = errors.decode("utf-8", "replace").strip().rpartition("\n")[2]
        yield f"{backend} on {device}", "missing", clean_line(f"ended with code {ended}: {last}")
