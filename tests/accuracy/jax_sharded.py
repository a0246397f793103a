"""The JAX formula of one of several devices against what XLA plans for each of them.

    python tests/accuracy/jax_sharded.py compile [TARGET] [--again]   ask XLA, store its answers
    python tests/accuracy/jax_sharded.py [report]                     formula against what is stored

TARGET is one of `PLANS`; without it, all whose compilers are installed. tpu-v5e and tpu-v5p need `pip install
"memconsole[tpu]"`, h100-80gb needs `memconsole[cuda-plan]`; no device is needed. Compiling takes 5-120 s a plan, so that
answers are kept in jax_sharded_truths.json, and reporting needs no compiler.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from itertools import product
from pathlib import Path

import msgspec

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from memconsole.memory.state.step_sizes import StepSizes, step_of
from memconsole.plan import catalog
from memconsole.plan.plan import Plan, PlanError, replace
from tests.accuracy.results import MIB, Bar, Case, Errors, Part, write
from tests.accuracy.xla import kind_of, peak

TRUTHS = Path(__file__).with_name("jax_sharded_truths.json")
BAR = Bar(median=0.05, under=0.10)
MODELS = {
    "stories": {"train.batch_size": 4, "data.sequence_length": 128},
    "gpt2": {"model.name": "gpt2", "train.batch_size": 4, "data.sequence_length": 512},
    "1b": {
        "model.name": "llama-3.2-1b",
        "train.batch_size": 4,
        "data.sequence_length": 1024,
        "optimize.precision": "bf16",
    },
}
UNTIED = {"model.name": "pythia-70m", "train.batch_size": 4, "data.sequence_length": 512}
"""A model whose head is not its embedding."""
SETTINGS = {
    "full": {"optimize.gradient_checkpointing": "full"},
    "chunked": {"optimize.fused_loss": True},
    "accumulating": {"optimize.accumulation_steps": 2},
}


class Wanted(msgspec.Struct, frozen=True):
    """A plan of several devices, in the words that name it."""

    model: str
    sharding: str
    count: int
    settings: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return "-".join((self.model, self.sharding, str(self.count), *self.settings))

    def plan(self, target: str) -> Plan:
        """The same plan on devices of `target`."""
        changes = {"backend": "jax", "device.name": target, "device.count": self.count}
        changes |= {"optimize.sharding": self.sharding} | (MODELS | {"untied": UNTIED})[self.model]
        for word in self.settings:
            changes |= SETTINGS[word]
        return replace(Plan(), changes)


class Truth(msgspec.Struct, frozen=True, kw_only=True):
    """XLA's plan of one training step on each device."""

    target: str
    name: str
    planned_bytes: int
    argument_bytes: int
    """Of these, all but the temporaries."""
    compiler: str


def _grid() -> tuple[Wanted, ...]:
    """Every model, sharding and number of devices with two of the eight ways to combine `SETTINGS`, in turn."""
    chosen = [
        tuple(w for w, on in zip(SETTINGS, c, strict=True) if on) for c in product((0, 1), repeat=3)
    ]
    cells = enumerate(product(MODELS, ("ddp", "fsdp"), (2, 4, 8)))
    return tuple(Wanted(*cell, chosen[(i + more) % 8]) for i, cell in cells for more in (0, 3))


PLANS: dict[str, tuple[Wanted, ...]] = {
    "cpu": (
        *_grid(),
        Wanted("untied", "fsdp", 4),
        Wanted("untied", "fsdp", 2, ("full",)),
        Wanted("untied", "fsdp", 4, ("chunked",)),
        Wanted("untied", "fsdp", 4, ("accumulating",)),
    ),
    "h100-80gb": (
        Wanted("gpt2", "ddp", 8),
        Wanted("gpt2", "fsdp", 8),
        Wanted("gpt2", "fsdp", 2, ("chunked", "accumulating")),
        Wanted("1b", "fsdp", 4),
        Wanted("1b", "fsdp", 8, ("full",)),
        Wanted("1b", "ddp", 8, ("full", "chunked", "accumulating")),
    ),
    "tpu-v5e": (
        Wanted("1b", "fsdp", 8, ("full",)),
        Wanted("gpt2", "ddp", 8),
        Wanted("stories", "fsdp", 8, ("chunked",)),
    ),
    "tpu-v5p": (Wanted("1b", "fsdp", 4, ("full", "chunked")),),
}  # fmt: skip
"""By target."""


def stored() -> list[Truth]:
    """What was compiled before, of plans that are still in `PLANS`."""
    if not TRUTHS.exists():
        return []
    known = {(target, wanted.name) for target, plans in PLANS.items() for wanted in plans}
    found = msgspec.json.decode(TRUTHS.read_bytes(), type=list[Truth])
    return [t for t in found if (t.target, t.name) in known]


def compile_plans(target: str, *, again: bool) -> None:
    """Ask XLA, one plan after another; each answer is stored as it comes. Raises `PlanError` without its compiler."""
    from memconsole_jax.tracing import trace_targets
    from tests.training.harness.planned_step import planned_step

    trace_targets.prepare_environment()
    kind = kind_of(target)
    known = set() if again else {t.name for t in stored() if t.target == target}
    for wanted in PLANS[target]:
        if wanted.name in known:
            continue
        started = time.monotonic()
        plan = wanted.plan(target)
        place = trace_targets.target("" if kind == "cpu" else target, kind, wanted.count)
        planned = planned_step(plan, catalog.model(plan), place)
        truth = Truth(
            target=target,
            name=wanted.name,
            planned_bytes=planned.needed,
            argument_bytes=planned.arguments,
            compiler=place.compiler,
        )
        kept = [t for t in stored() if (t.target, t.name) != (target, wanted.name)]
        kept = sorted([*kept, truth], key=lambda t: (t.target, t.name))
        TRUTHS.write_bytes(msgspec.json.format(msgspec.json.encode(kept), indent=1) + b"\n")
        seconds = time.monotonic() - started
        print(
            f"{target} {planned.needed / MIB:9.1f} MiB {seconds:5.0f} s  {wanted.name}", flush=True
        )


def estimated_bytes(wanted: Wanted, target: str) -> int:
    """The formula's live bytes at the training step's peak, without the runtime's own."""
    return peak(step(wanted, target))


def step(wanted: Wanted, target: str) -> StepSizes:
    """The sizes of a step on one of the devices."""
    plan = wanted.plan(target)
    return step_of(plan, catalog.model(plan), kind_of(target))


def report() -> Part:
    """The formula against everything stored, by target."""
    rows, found = [], {(t.target, t.name): t for t in stored()}
    for target, plans in PLANS.items():
        cases = tuple(
            Case(
                plan=wanted.name,
                estimated_bytes=estimated_bytes(wanted, target),
                measured_bytes=found[target, wanted.name].planned_bytes,
            )
            for wanted in plans
            if (target, wanted.name) in found
        )
        truth = f"XLA for {target}, ddp and fsdp"
        rows.append(
            Errors(estimate="JAX `~` of one of several devices", truth=truth, bar=BAR, cases=cases)
        )
    compilers = sorted({t.compiler for t in found.values()})
    return Part(
        name="jax-sharded",
        command="python tests/accuracy/jax_sharded.py report",
        rows=tuple(row for row in rows if row.cases),
        note=f"Compiled by {' and '.join(compilers)}.",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command")
    asked = commands.add_parser("compile")
    asked.add_argument("target", nargs="?", choices=tuple(PLANS))
    asked.add_argument(
        "--again", action="store_true", help="what is stored, too: the engine changed"
    )
    commands.add_parser("report")
    arguments = parser.parse_args()
    if arguments.command == "compile":
        # Compile sooner: buffers are assigned before code is optimized.
        os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
        for target in [arguments.target] if arguments.target else PLANS:
            try:
                compile_plans(target, again=arguments.again)
            except PlanError as error:
                print(f"{target}: not compiled here: {error}", file=sys.stderr)
        return
    part = report()
    for row in part.rows:
        for case in getattr(row, "cases", ()):
            print(f"{case.error:+7.1%} {case.measured_bytes / MIB:9.1f} MiB  {case.plan}")
    write(part, ("jax",))


if __name__ == "__main__":
    main()
