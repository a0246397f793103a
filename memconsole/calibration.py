"""Calibrates estimates with the receipts of finished runs on this machine."""

from __future__ import annotations

import os
import threading
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec

from memconsole import regular_file, typed_json
from memconsole.memory.answers.receipts import Machine, Measured, calibrated, setup_of
from memconsole.memory.estimate import table_of
from memconsole.memory.table import Estimate
from memconsole.plan.plan import Plan
from memconsole.runs.read.report.receipt import driver_version
from memconsole.runs.record.directory import RECEIPT, runs_root

MOST_RUNS = 20
"""Only this many of the newest runs of one setup are used."""
REFRESH_SECONDS = 5.0
MOST_BYTES = 1 << 20
"""A larger receipt was not written by this program and is ignored."""
FRAMEWORKS = ("torch", "jax", "jaxlib", "flax", "optax")


class _Peaks(msgspec.Struct, kw_only=True):
    peak_bytes: int | None = None


class _Lacked(msgspec.Struct, kw_only=True):
    needed_bytes: int


class _Stored(msgspec.Struct, kw_only=True):
    """The fields of receipt.json that calibration reads."""

    device_name: str
    device_total_bytes: int | None = None
    driver: str | None = None
    versions: dict[str, str]
    plan: dict[str, Any]
    steps: int
    measured: _Peaks
    shortfall: _Lacked | None = None
    missing_records: int = 0


class Receipts:
    """The receipts in a folder of runs, by setup. Each is read once; damaged ones are skipped."""

    def __init__(self, root: Path | None = None) -> None:
        self._root = root
        self._seen: set[str] = set()
        self._by_setup: dict[tuple[object, ...], list[Measured]] = {}
        self._decoder = typed_json.decoder(_Stored)
        self._lock = threading.Lock()
        self._machines: dict[str, Machine] = {}
        self._refreshed: float | None = None

    def refresh(self) -> None:
        """Read new receipts, at most every few seconds. A run without one costs one `stat` each
        time.
        """
        with self._lock:
            now = time.monotonic()
            if self._refreshed is not None and now - self._refreshed < REFRESH_SECONDS:
                return
            self._refreshed = now
            try:
                names = sorted(os.listdir(self._root or runs_root()))
            except OSError:
                return
            for name in names:
                if name not in self._seen:
                    self._read(name)

    def calibrate(self, plan: Plan, found: Estimate) -> Estimate:
        """`found` with its table calibrated by runs of the same setup, if its device is local."""
        if not found.table.budget.local:
            return found
        with self._lock:
            runs = list(self._by_setup.get(setup_of(plan), ()))[-MOST_RUNS:]
        if not runs:
            return found
        device = found.table.budget
        table = calibrated(
            found.table,
            plan,
            self._machine(device.name, device.kind),
            runs,
            lambda earlier: table_of(earlier, device),
        )
        return msgspec.structs.replace(found, table=table)

    def _machine(self, name: str, kind: str) -> Machine:
        if name not in self._machines:
            versions = {}
            for package in FRAMEWORKS:
                try:
                    versions[package] = version(package)
                except PackageNotFoundError:
                    continue
            self._machines[name] = Machine(name, versions, driver_version(kind))
        return self._machines[name]

    def _read(self, name: str) -> None:
        path = (self._root or runs_root()) / name / RECEIPT
        try:
            stored = self._decoder.decode(regular_file.read(path, MOST_BYTES, follow=False))
            plan = typed_json.convert(_with_heap(stored.plan), Plan)
        except FileNotFoundError:
            return
        except (OSError, ValueError, RecursionError, msgspec.MsgspecError):
            self._seen.add(name)
            return
        self._seen.add(name)
        lacked = stored.shortfall
        peak = lacked.needed_bytes if lacked else stored.measured.peak_bytes
        # A run that ended in its first step did not measure a whole step, and a damaged log may lack
        # the record of the peak.
        if not peak or stored.missing_records or (lacked is None and stored.steps < 2):
            return
        run = Measured(
            plan=plan,
            device_name=stored.device_name,
            device_total_bytes=stored.device_total_bytes,
            driver=stored.driver,
            versions=stored.versions,
            peak_bytes=peak,
            at_least=lacked is not None,
        )
        self._by_setup.setdefault(setup_of(plan), []).append(run)


def _with_heap(stored: dict[str, Any]) -> dict[str, Any]:
    """A receipt's plan with `optimize.heap`. Receipts without it are of runs whose heap was tight."""
    return {**stored, "optimize": {"heap": "tight", **stored.get("optimize", {})}}
