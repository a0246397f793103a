"""Calibrates estimates of memory and time with the receipts of finished runs on this machine."""

from __future__ import annotations

import os
import threading
import time
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec

from memconsole import regular_file, typed_json
from memconsole.memory.answers.pace import LEAST_STEPS, paced, slowdown
from memconsole.memory.answers.receipts import Machine, Measured, calibrated, setup_of
from memconsole.memory.estimate import model_of, table_of
from memconsole.memory.seconds import seconds_per_unit
from memconsole.memory.table import Estimate
from memconsole.plan.machine.budget import Budget
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


class _ReceiptFields(msgspec.Struct, kw_only=True):
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
    tokens_per_second: float | None = None


def calibrated_here(plan: Plan, found: Estimate) -> Estimate:
    """`found`, calibrated with the runs measured on this machine; for commands, which ask once."""
    receipts = Receipts()
    receipts.refresh()
    return receipts.calibrate(plan, found)


class Receipts:
    """The receipts in a folder of runs, by setup. Each is read once; damaged ones are skipped."""

    def __init__(self, root: Path | None = None) -> None:
        self._root = root
        self._seen: set[str] = set()
        self._by_setup: dict[tuple[object, ...], list[Measured]] = {}
        self._all: list[Measured] = []
        self._slowdowns: dict[tuple[object, ...], float | None] = {}
        self._decoder = typed_json.decoder(_ReceiptFields)
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
        """`found` with its table calibrated by runs of the same setup and its times by runs of the
        same setup or of models of like size, if its device is local.
        """
        device = found.table.budget
        if not device.local:
            return found
        with self._lock:
            every = self._all[-MOST_RUNS:]
            runs = list(self._by_setup.get(setup_of(plan), ()))[-MOST_RUNS:]
        if not every:
            return found
        machine = self._machine(device.name, device.kind)
        factor = self._slowdown(plan, machine, [*every, *runs], device)
        if factor is not None:
            found = paced(found, factor)
        if not runs:
            return found
        price = partial(table_of, budget=device)
        table = calibrated(found.table, plan, machine, runs, price)
        return msgspec.structs.replace(found, table=table)

    def _slowdown(
        self, plan: Plan, machine: Machine, runs: list[Measured], device: Budget
    ) -> float | None:
        """What `pace.slowdown` finds, remembered until there is another receipt."""
        key = (*setup_of(plan), plan.device.count, machine.device_name)
        if key not in self._slowdowns:
            self._slowdowns[key] = slowdown(
                plan,
                machine,
                runs,
                lambda p: 1 / seconds_per_unit(p, model_of(p), device),
                lambda p: sum(each.size for each in model_of(p).parameters()),
            )
        return self._slowdowns[key]

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
            units_per_second=stored.tokens_per_second if stored.steps >= LEAST_STEPS else None,
        )
        self._all.append(run)
        self._slowdowns.clear()
        self._by_setup.setdefault(setup_of(plan), []).append(run)


def _with_heap(stored: dict[str, Any]) -> dict[str, Any]:
    """A receipt's plan with `optimize.heap`. Receipts without it are of runs whose heap was tight."""
    return {**stored, "optimize": {"heap": "tight", **stored.get("optimize", {})}}
