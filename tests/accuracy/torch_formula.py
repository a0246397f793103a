"""The torch formula against a trace of the engine's own step, over random plans of every family and setting.

    python tests/accuracy/torch_formula.py [--experts | --tiled] [--first SEED] [--plans N] [--phases]

Needs torch, no accelerator: the trace runs on fake tensors. Shown are the plans that miss by more than 2 %. Mixtures of
experts and tiled MLPs have seeds and a row of their own.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from memconsole.memory.activations.torch_step import moments
from memconsole.memory.state.step_sizes import step_of
from tests.accuracy.results import Bar, Errors, Part, unavailable, write
from tests.accuracy.results import Case as Result
from tests.accuracy.wide_plans import EXPERTS, TILED, Case, describe, draw

FIRST, PLANS = 1000, 200
OF_EXPERTS = 40
OF_TILES = 80
ONE_LAYER = (
    "Estimates over by more than 5 % are of models of one layer with adapters of the MLP alone."
)
BAR = Bar(median=0.03, under=0.08)
TRAINING = ("forward", "loss", "backward", "optimizer step")
SHOWN = 0.02


def estimated(case: Case) -> dict[str, int]:
    """The formula's live bytes at the largest moment of each phase, without the runtime's own."""
    peaks: dict[str, int] = {}
    for moment in moments(step_of(case.plan, case.architecture, case.kind)):
        peaks[moment.phase] = max(peaks.get(moment.phase, 0), moment.total)
    return peaks


def traced(case: Case) -> dict[str, int]:
    """The same from a trace."""
    from memconsole_torch.tracing.trace_step import trace

    # The optimizer's state is there from the start, so that one step shows everything.
    return dict(trace(case.plan, case.architecture, case.kind, steps=1).peaks)


def compare(seed: int, *, phases: bool = False) -> Result:
    """One plan's training peaks; phase by phase on request."""
    case = draw(seed)
    expected, found = estimated(case), traced(case)
    estimate, truth = (max(peaks[phase] for phase in TRAINING) for peaks in (expected, found))
    result = Result(plan=describe(case), estimated_bytes=estimate, measured_bytes=truth)
    if phases or abs(result.error) > SHOWN:
        print(f"{seed:5} {result.error:+7.1%} {truth / 2**20:10.1f} MiB  {result.plan}", flush=True)
    if phases:
        for phase, bytes_ in found.items():
            error = expected[phase] / bytes_ - 1
            print(f"      {error:+7.1%} {bytes_ / 2**20:10.1f} MiB  {phase}")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--first", type=int, help="first seed of plans that are only shown")
    parser.add_argument("--plans", type=int, default=PLANS)
    parser.add_argument("--experts", action="store_true", help="mixtures of experts")
    parser.add_argument("--tiled", action="store_true", help="plans with a tiled MLP")
    parser.add_argument("--phases", action="store_true", help="show every plan, phase by phase")
    options = parser.parse_args()
    if importlib.util.find_spec("torch") is None:
        unavailable('torch is not installed: pip install "memconsole[torch]"')
    os.environ["OMP_NUM_THREADS"] = "1"
    name, estimate, (first, plans) = "torch-formula", "torch ~", (FIRST, PLANS)
    command = "python tests/accuracy/torch_formula.py"
    if options.experts:
        name, estimate = "torch-experts", "torch ~ of mixtures of experts"
        first, plans, command = EXPERTS, OF_EXPERTS, f"{command} --experts"
    if options.tiled:
        name, estimate = "torch-tiled", "torch ~ with a tiled MLP"
        first, plans, command = TILED, OF_TILES, f"{command} --tiled"
    if options.first is not None:
        first, plans = options.first, options.plans
    start = time.monotonic()
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as workers:
        found = workers.map(partial(compare, phases=options.phases), range(first, first + plans))
        cases = tuple(found)
    truth = "its own trace, CPU and CUDA kernels"
    row = Errors(estimate=estimate, truth=truth, bar=BAR, cases=cases)
    print(f"{time.monotonic() - start:.0f} seconds")
    if options.first is None:
        note = ONE_LAYER if options.tiled else ""
        write(Part(name=name, command=command, rows=(row,), note=note), packages=("torch",))
    else:
        print(" | ".join(row.cells()))


if __name__ == "__main__":
    main()
