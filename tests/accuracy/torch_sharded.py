"""The torch formula of one of several devices against a trace of its process, whose others are imagined.

    python tests/accuracy/torch_sharded.py [--phases] [PLAN ...]

Needs torch, no accelerator: the trace runs on fake tensors. ``PLAN`` names rows of `PLANS`; without any, all are
compared and stored.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from memconsole.memory.formula import moments
from memconsole.memory.state.step_sizes import step_of
from memconsole.plan import catalog
from memconsole.plan.plan import Plan, replace
from tests.accuracy.results import MIB, Bar, Case, Errors, Part, unavailable, write

BAR = Bar(median=0.03, under=0.10)
FULL = {"optimize.gradient_checkpointing": "full"}
BF16 = {"optimize.precision": "bf16"}
GPT2 = {"model.name": "gpt2", "train.batch_size": 4, "data.sequence_length": 512}
ONE_B = {"model.name": "llama-3.2-1b", "train.batch_size": 4, "data.sequence_length": 1024}
EIGHT_B = {"model.name": "llama-3.1-8b", "train.batch_size": 1, "data.sequence_length": 2048}
ADAPTERS = {"optimize.lora_rank": 16, "optimize.freeze_base": True}
LQR = {"preset": "lqr"}


class Wanted(NamedTuple):
    """A plan of several devices, and their kind."""

    sharding: str
    count: int
    settings: dict[str, Any]
    kind: str = "gpu"

    @property
    def plan(self) -> Plan:
        settings = dict(self.settings)
        preset = settings.pop("preset", None)
        plan = catalog.preset(preset) if preset else Plan()
        several = {"device.count": self.count, "optimize.sharding": self.sharding}
        return replace(plan, several | settings)


PLANS: dict[str, Wanted] = {
    "gpt2-ddp-2": Wanted("ddp", 2, GPT2),
    "gpt2-ddp-4-accumulating": Wanted("ddp", 4, GPT2 | BF16 | {"optimize.accumulation_steps": 4}),
    "1b-ddp-8-full": Wanted("ddp", 8, ONE_B | BF16 | FULL),
    "gpt2-fsdp-2": Wanted("fsdp", 2, GPT2),
    "gpt2-fsdp-4-full": Wanted("fsdp", 4, GPT2 | BF16 | FULL),
    "gpt2-fsdp-2-lion": Wanted("fsdp", 2, GPT2 | {"optimize.optimizer": "lion"}),
    "1b-fsdp-2": Wanted("fsdp", 2, ONE_B | BF16),
    "1b-fsdp-4-full": Wanted("fsdp", 4, ONE_B | BF16 | FULL),
    "1b-fsdp-4-offload": Wanted("fsdp", 4, ONE_B | BF16 | FULL | {"optimize.optimizer_offload": "pinned"}),
    "1b-fsdp-8-accumulating": Wanted("fsdp", 8, ONE_B | BF16 | {"optimize.accumulation_steps": 4}),
    "1b-fsdp-4-adapters": Wanted("fsdp", 4, ONE_B | BF16 | ADAPTERS),
    "8b-fsdp-8-full": Wanted("fsdp", 8, EIGHT_B | BF16 | FULL),
    "8b-fsdp-4-chunked": Wanted("fsdp", 4, EIGHT_B | BF16 | FULL | {"optimize.fused_loss": True}),
    "stories-fsdp-2-cpu": Wanted("fsdp", 2, {}, "cpu"),
    "stories-ddp-2-cpu": Wanted("ddp", 2, {}, "cpu"),
    "lqr-fsdp-2-cpu": Wanted("fsdp", 2, LQR, "cpu"),
    "lqr-fsdp-2": Wanted("fsdp", 2, LQR),
}  # fmt: skip
"""By name."""


def estimated(wanted: Wanted) -> dict[str, int]:
    """The formula's live bytes at the largest moment of each phase, without the runtime's own."""
    plan, peaks = wanted.plan, dict[str, int]()
    for moment in moments(step_of(plan, catalog.model(plan), wanted.kind)):
        peaks[moment.phase] = max(peaks.get(moment.phase, 0), moment.total)
    return peaks


def traced(wanted: Wanted) -> dict[str, int]:
    """The same from a trace."""
    from memconsole_torch.tracing.trace_step import trace

    plan = wanted.plan
    return dict(trace(plan, catalog.model(plan), wanted.kind).peaks)


def compare(name: str, *, phases: bool = False) -> Case:
    """One plan's peaks; phase by phase on request."""
    start = time.monotonic()
    expected, found = estimated(PLANS[name]), traced(PLANS[name])
    case = Case(
        plan=name,
        estimated_bytes=max(expected.values()),
        measured_bytes=max(found.values()),
    )
    seconds = time.monotonic() - start
    truth = case.measured_bytes / MIB
    print(f"{case.error:+7.1%} {truth:10.1f} MiB  {name}  {seconds:.0f} s", flush=True)
    for phase, truth_bytes in found.items() if phases else ():
        error = expected[phase] / truth_bytes - 1
        print(f"      {error:+7.1%} {truth_bytes / MIB:10.1f} MiB  {phase}", flush=True)
    return case


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("plan", nargs="*", help=f"{' | '.join(PLANS)}")
    parser.add_argument("--phases", action="store_true", help="show every phase")
    options = parser.parse_args()
    if unknown := [name for name in options.plan if name not in PLANS]:
        parser.error(f"no plan {unknown[0]}; there are {', '.join(PLANS)}")
    if importlib.util.find_spec("torch") is None:
        unavailable('torch is not installed: pip install "memconsole[torch]"')
    import torch

    torch.set_num_threads(1)
    cases = tuple(compare(name, phases=options.phases) for name in options.plan or PLANS)
    row = Errors(
        estimate="torch ~ of one of several devices",
        truth="a trace of its process, ddp and fsdp",
        bar=BAR,
        cases=cases,
    )
    part = Part(name="torch-sharded", command="python tests/accuracy/torch_sharded.py", rows=(row,))
    if options.plan:
        print(" | ".join(row.cells()))
    else:
        write(part, packages=("torch",))


if __name__ == "__main__":
    main()
