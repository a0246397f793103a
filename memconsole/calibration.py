"""Calibrates estimates of memory and time with the receipts of finished runs on this machine."""

from __future__ import annotations

import os
import threading
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec

from memconsole import regular_file, typed_json
from memconsole.memory.answers.cards import Price
from memconsole.memory.answers.pace import Slowdown, paced, slowdown
from memconsole.memory.answers.receipts import Machine, Measured, calibrated, kin_of, setup_of
from memconsole.memory.estimate import Lookup, model_of, table_of
from memconsole.memory.seconds import step_seconds
from memconsole.memory.state.data import units_per_step
from memconsole.memory.table import Estimate, MemoryTable
from memconsole.plan.data.paths import with_absolute_model
from memconsole.plan.machine.budget import Budget
from memconsole.plan.plan import Plan, PlanError
from memconsole.plan.plan_file import from_document
from memconsole.runs.read.report.measured import SETTLED_STEPS
from memconsole.runs.read.report.receipt import driver_version
from memconsole.runs.read.state.reduce import PROFILING
from memconsole.runs.record.directory import RECEIPT, RunError
from memconsole.runs.record.run_store import runs_root

MOST_RUNS = 20
"""Only this many of the newest runs are used."""
REFRESH_SECONDS = 5.0
MOST_BYTES = 1 << 20
"""A larger receipt was not written by this program and is ignored."""
UNPRICED = frozenset({"sample", "reference", PROFILING})
"""Phases that no estimate covers. Their peaks, where a JAX run on a CPU may compile, correct none."""
FRAMEWORKS = ("torch", "jax", "jaxlib", "flax", "optax")


class _Peaks(msgspec.Struct, kw_only=True):
    peak_bytes: int | None = None


class _Shortfall(msgspec.Struct, kw_only=True):
    needed_bytes: int


class _ReceiptFields(msgspec.Struct, kw_only=True):
    """The fields of receipt.json that calibration reads."""

    device_name: str
    device_total_bytes: int | None = None
    driver: str | None = None
    versions: dict[str, str]
    plan: dict[str, Any]
    steps: int
    resized_at: int = 0
    measured: _Peaks
    by_phase: dict[str, int] = {}
    shortfall: _Shortfall | None = None
    missing_records: int = 0
    tokens_per_second: float | None = None
    step_seconds: float | None = None
    """Older receipts have `tokens_per_second` alone."""


def receipts_here() -> Receipts:
    """The receipts of the runs on this machine so far; for commands, which ask once."""
    receipts = Receipts()
    receipts.refresh()
    return receipts


def calibrated_here(plan: Plan, priced: Estimate) -> Estimate:
    """`priced`, calibrated with the runs measured on this machine."""
    return receipts_here().calibrate(plan, priced)


class Receipts:
    """The receipts in a folder of runs. Each is read once for each time it was written; damaged ones are skipped."""

    def __init__(self, root: Path | None = None) -> None:
        self._root = root
        self._read: dict[str, tuple[int, Measured | None]] = {}
        """When each run's receipt was written, in nanoseconds, and what it measured; None if it cannot be used."""
        self._all: list[Measured] = []
        """The measurements of all usable receipts, the oldest first."""
        self._by_kin: dict[tuple[object, ...], list[Measured]] = {}
        """The same by plans that differ in optimizations, batch sizes and length alone."""
        self._priced: dict[tuple[Plan, str, str], MemoryTable] = {}
        self._slowdowns: dict[tuple[object, ...], Slowdown | None] = {}
        self._decoder = typed_json.decoder(_ReceiptFields)
        self._lock = threading.Lock()
        self._machines: dict[str, Machine] = {}
        self._refreshed: float | None = None

    def price(self, lookup: Lookup | None = None) -> Price:
        """A function that makes calibrated tables, with the exact numbers that `lookup` returns."""
        return lambda plan, on: self.calibrate_table(plan, table_of(plan, on, lookup))

    def refresh(self) -> None:
        """Read new receipts and forget those of deleted runs, at most every few seconds. Each run
        costs one `stat` each time.
        """
        with self._lock:
            now = time.monotonic()
            if self._refreshed is not None and now - self._refreshed < REFRESH_SECONDS:
                return
            self._refreshed = now
            try:
                root = self._root or runs_root()
                names = sorted(os.listdir(root))
            except (RunError, OSError):
                return
            receipts = {name: read for name in names if (read := self._entry(root, name))}
            if receipts == self._read:
                return
            self._read = receipts
            self._all = [run for _, run in receipts.values() if run is not None]
            self._by_kin = {}
            for run in self._all:
                self._by_kin.setdefault(kin_of(run.plan), []).append(run)
            self._slowdowns.clear()

    def calibrate(self, plan: Plan, priced: Estimate) -> Estimate:
        """`priced` with its table calibrated by runs of the same setup and its times by runs of the
        same setup or of models of like size, if its device is local.
        """
        device, plan = priced.table.budget, with_absolute_model(plan)
        if not device.local:
            return priced
        slowdown = self.slowdown(plan, device)
        if slowdown is not None:
            priced = paced(priced, slowdown)
        return msgspec.structs.replace(priced, table=self.calibrate_table(plan, priced.table))

    def calibrate_table(self, plan: Plan, table: MemoryTable) -> MemoryTable:
        """`table` calibrated by runs of the same setup, or of setups with other optimizations, if its
        device is local."""
        plan = with_absolute_model(plan)
        device, runs = table.budget, self._kin(plan)
        if not device.local or not runs:
            return table

        def price(other: Plan) -> MemoryTable:
            key = other, device.name, device.kind
            if key not in self._priced:
                self._priced[key] = table_of(other, device)
            return self._priced[key]

        machine = self._machine(device.name, device.kind)
        return calibrated(table, plan, machine, runs, price)

    def _kin(self, plan: Plan) -> list[Measured]:
        """The newest runs of the plan's setup, and those of setups with other optimizations."""
        with self._lock:
            runs = list(self._by_kin.get(kin_of(plan), ()))
        setup = setup_of(plan)
        own = [run for run in runs if setup_of(run.plan) == setup]
        return (own or runs)[-MOST_RUNS:]

    def slowdown(self, plan: Plan, device: Budget) -> Slowdown | None:
        """What `pace.slowdown` finds for a local device, remembered until there is another receipt."""
        plan = with_absolute_model(plan)
        with self._lock:
            newest = self._all[-MOST_RUNS:]
        if not newest or not device.local:
            return None
        machine, runs = self._machine(device.name, device.kind), [*newest, *self._kin(plan)]
        key = (*setup_of(plan), plan.device.count, plan.device.threads, machine.device_name)
        if key not in self._slowdowns:
            self._slowdowns[key] = slowdown(
                plan,
                machine,
                runs,
                lambda p: step_seconds(p, model_of(p), device),
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

    def _entry(self, root: Path, name: str) -> tuple[int, Measured | None] | None:
        """The entry of one run in `_read`; None if it has no receipt."""
        path = root / name / RECEIPT
        try:
            written = os.lstat(path).st_mtime_ns
        except OSError:
            return None
        known = self._read.get(name)
        if known is not None and known[0] == written:
            return known
        return written, self._measured(path)

    def _measured(self, path: Path) -> Measured | None:
        """What a receipt measured; None if it cannot be used."""
        try:
            stored = self._decoder.decode(regular_file.read(path, MOST_BYTES, follow=False))
            plan = from_document(_with_heap(stored.plan))
        except (OSError, ValueError, RecursionError, msgspec.MsgspecError):
            return None
        shortfall, steps = stored.shortfall, stored.steps - stored.resized_at
        priced = [size for phase, size in stored.by_phase.items() if phase not in UNPRICED]
        ran_out = shortfall is not None
        peak = (
            shortfall.needed_bytes if shortfall else max(priced, default=stored.measured.peak_bytes)
        )
        # The first steps are slow, and while a heap grows a run has not reached its peak. A damaged log may lack the record
        # of the peak.
        if not peak or stored.missing_records or (not ran_out and steps < SETTLED_STEPS):
            return None
        return Measured(
            plan=plan,
            device_name=stored.device_name,
            device_total_bytes=stored.device_total_bytes,
            driver=stored.driver,
            versions=stored.versions,
            peak_bytes=peak,
            at_least=ran_out,
            step_seconds=_step_seconds(stored, plan) if steps >= SETTLED_STEPS else None,
        )


def _step_seconds(stored: _ReceiptFields, plan: Plan) -> float | None:
    """The typical seconds of a run's step; for a receipt that has only its speed, those of a step without padding."""
    if stored.step_seconds or not stored.tokens_per_second:
        return stored.step_seconds
    try:
        return units_per_step(plan, model_of(plan)) / stored.tokens_per_second
    except (PlanError, ValueError):
        return None


def _with_heap(stored: dict[str, Any]) -> dict[str, Any]:
    """A receipt's plan with `optimize.heap`. Receipts without it are of runs whose heap was tight."""
    return {**stored, "optimize": {"heap": "tight", **stored.get("optimize", {})}}
