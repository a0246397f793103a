"""Speed, share of the card's peak and memory on one NVIDIA card, beside nanoGPT and transformers' Trainer, in bf16.

    python tests/bench/gpu.py [--ladder] [--only WORDS]    needs a card; writes results/gpu.json and docs/speed.md
    python tests/bench/gpu.py --device cpu                 the same flow on small models, where there is none; writes nothing

Each contender takes a few steps of the same rows in a process of its own with a time limit, all within eight minutes.
As many as fit on the card get ready at the same time; then each takes its counted steps alone.
nanoGPT, compiled, is the checkout that NANOGPT_DIR names; a peer that is not there is reported missing. `--ladder`
measures a 3B model instead, with one more optimization on each rung. Results are written after each contender, and
another run measures only what is missing or failed; to measure anew, remove results/gpu.json.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = PLACES = [str(ROOT), str(ROOT / "backends")]

from memconsole.devices.budget import budget
from memconsole.devices.probe import read_once
from memconsole.memory.estimate import table_of
from memconsole.memory.seconds import peak_units_per_second, step_seconds
from memconsole.plan import catalog
from memconsole.plan.check import check
from memconsole.plan.machine.budget import Budget
from memconsole.plan.plan import Plan, apply_settings
from memconsole.plan.plan_file import dumps
from memconsole.runs.act.environment import trainer_environment
from tests.bench.trained import BACKENDS, into_page, machine, markdown

RESULTS = Path(__file__).with_name("results") / "gpu.json"
PAGE = ROOT / "docs" / "speed.md"
TOTAL_SECONDS, RUN_SECONDS = 460, 110
STEPS, SETTLING = 10, 4
"""Steps of a run that count, and how many before them do not: they compile."""
AT_ONCE, SPARE = 5, 0.85
"""Contenders that get ready at the same time, and the share of the card that they may need together."""
PEERS_NEED = 1.5
"""Memory of a peer, as a multiple of the estimate for torch."""
BF16 = "optimize.precision=bf16"


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One piece of work."""

    name: str
    settings: tuple[str, ...]
    peers: tuple[str, ...] = ()
    backends: tuple[str, ...] = BACKENDS
    compiled: bool = False
    """Whether each backend is measured a second time with optimize.compile."""


def _sized(model: str, rows: int, length: int, *more: str) -> tuple[str, ...]:
    size = f"train.batch_size={rows}", f"data.sequence_length={length}"
    return f"model.name={model}", *size, BF16, *more


CASES = (
    Case(name="GPT-2 124 M, 16 x 1,024", settings=_sized("gpt2", 16, 1024),
         peers=("nanoGPT", "Trainer"), compiled=True),
    Case(name="SmolLM2 360 M, 8 x 2,048", settings=_sized("smollm2-360m", 8, 2048),
         peers=("Trainer",), compiled=True),
    Case(name="Llama 3.2 1 B, 4 x 2,048", settings=_sized("llama-3.2-1b", 4, 2048),
         peers=("Trainer",), compiled=True),
)  # fmt: skip
REHEARSED = (
    Case(name="GPT-2 of two layers, 2 x 32", peers=("nanoGPT", "Trainer"),
         settings=_sized("{gpt2}", 2, 32)),
)  # fmt: skip
COMPILED = "+ compiled"
RUNGS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("plain", ()),
    (COMPILED, ("optimize.compile=true",)),
    ("+ chunked loss", ("optimize.fused_loss=true",)),
    ("+ checkpointing", ("optimize.gradient_checkpointing=full",)),
    ("+ update in the backward pass", ("optimize.optimizer_in_backward=true", "train.grad_clip=0")),
    ("+ 8-bit AdamW", ("optimize.optimizer=adamw-8bit",)),
    ("+ offloaded activations, not compiled", ("optimize.compile=false", "optimize.activation_offload=true")),
)  # fmt: skip
LORA = ("optimize.lora_rank=16", "optimize.freeze_base=true", "optimize.fused_loss=true",
        "optimize.gradient_checkpointing=full")  # fmt: skip


def ladder() -> tuple[Case, ...]:
    """The rungs, each with all before it, then adapters alone. JAX has no rung of its own for compiled blocks."""
    found: list[tuple[str, tuple[str, ...]]] = []
    so_far: tuple[str, ...] = ()
    for name, settings in RUNGS:
        so_far += settings
        found.append((name, so_far))
    found += [
        ("LoRA", LORA),
        ("LoRA, tiled MLP", (*LORA, "optimize.tiled_mlp=true")),
        ("LoRA on NF4", (*LORA, "optimize.base_storage=nf4")),
    ]
    cases = []
    for name, settings in found:
        in_jax = tuple(
            s
            for s in settings
            if not s.startswith(("optimize.compile=", "optimize.optimizer_in_backward="))
        )
        for backend, own in ("torch", settings), ("jax", in_jax):
            if backend == "torch" or name != COMPILED:
                work = _sized("llama-3.2-3b", 2, 4096, *own)
                cases.append(
                    Case(
                        name=f"Llama 3.2 3 B, 2 x 4,096, {name}", settings=work, backends=(backend,)
                    )
                )
    return tuple(cases)


def plan_of(case: Case, backend: str, device: str, *more: str) -> Plan:
    """Raises `PlanError`."""
    name = "cuda:0" if device == "cuda" else "cpu"
    words = f"backend={backend}", f"device.name={name}", "data.tokenizer=none"
    plan = apply_settings(Plan(), (*words, *case.settings, *more))
    check(plan)
    return plan


Contender = tuple[str, str, Plan]
"""What is shown, who runs, and the plan."""


def contenders(case: Case, device: str) -> list[Contender]:
    first = case.backends[0]
    found = [(peer, peer, plan_of(case, first, device)) for peer in case.peers]
    for backend in case.backends:
        found.append((backend, "memconsole", plan_of(case, backend, device)))
        if case.compiled:
            plan = plan_of(case, backend, device, "optimize.compile=true")
            found.append((f"{backend}, compiled", "memconsole", plan))
    return found


def missing(who: str) -> str:
    """Why a peer cannot run; empty if it can."""
    if who == "nanoGPT" and not (Path(os.environ.get("NANOGPT_DIR", "")) / "model.py").is_file():
        return "missing: NANOGPT_DIR names no checkout"
    found = [name for name in ("transformers", "accelerate") if not importlib.util.find_spec(name)]
    return f"missing: {found[0]} is not installed" if who == "Trainer" and found else ""


def card_of(device: str) -> Budget:
    """The card, or the CPU. A driver can take seconds to answer first."""
    return budget(plan_of(CASES[0], "torch", device), read_once(30.0))


def driver() -> str:
    """NVIDIA's driver, by its version."""
    import pynvml

    pynvml.nvmlInit()
    return str(pynvml.nvmlSystemGetDriverVersion())


def count(
    who: str, plan: Plan, device: str, steps: int, card: Budget, lock: Path
) -> dict[str, Any]:
    """Tokens per second (median), their share of the card's peak rate, and peak bytes; or a `problem`."""
    if problem := missing(who):
        return {"problem": problem}
    environment = trainer_environment(plan, os.environ, kind=device)
    environment.setdefault("CUDA_VISIBLE_DEVICES", "0")  # the Trainer would use all cards
    command = [sys.executable, str(Path(__file__).with_name("gpu_run.py"))]
    command += [who, str(min(SETTLING, steps)), str(steps), str(lock)]
    try:
        done = subprocess.run(
            command, input=dumps(plan), env=environment, capture_output=True, text=True,
            timeout=RUN_SECONDS, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"problem": f"took over {RUN_SECONDS} s"}
    if done.returncode:
        print(done.stderr[-1500:], file=sys.stderr)
        last = (done.stderr.strip().splitlines() or [""])[-1]
        return {"problem": f"failed: {last[:80]}"}
    found = json.loads(done.stdout)
    seconds = statistics.median(found["seconds"])
    rate = plan.micro_batch_tokens / seconds
    model = catalog.model(plan)
    most = peak_units_per_second(plan, model, card)
    counted = {
        "tokens_per_second": rate,
        "flops_utilization": rate / most,
        "peak_bytes": found["peak_bytes"],
        "step_seconds": seconds,
    }
    if who == "memconsole":
        counted["estimated_peak_bytes"] = table_of(plan, card).peak_bytes
        counted["estimated_step_seconds"] = step_seconds(plan, model, card)
    return counted


Results = dict[str, dict[str, dict[str, Any]]]
"""By case and contender."""


def measure(
    cases: tuple[Case, ...],
    device: str,
    steps: int,
    card: Budget,
    results: Results,
    keep: Callable[[Results], None],
) -> None:
    """Measure each case's contenders that are not in `results`, group by group, while there is time. Calls `keep` after
    each group."""
    start = time.monotonic()
    for case in cases:
        rows = results.setdefault(case.name, {})
        missing = [c for c in contenders(case, device) if c[0] not in rows or _told(rows[c[0]])]
        for group in groups(missing, card):
            late = time.monotonic() - start > TOTAL_SECONDS - RUN_SECONDS
            with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(group)) as pool:
                lock = Path(folder) / "turns"
                asked = [
                    (shown, pool.submit(count, who, plan, device, steps, card, lock))
                    for shown, who, plan in group
                    if not late
                ]
                found = {shown: answer.result() for shown, answer in asked}
            for shown, _, _ in group:
                rows[shown] = found.get(shown, {"problem": "out of time"})
                print(f"{case.name}: {shown}: {rows[shown]}", flush=True)
            keep(results)


def groups(contenders: list[Contender], card: Budget) -> list[list[Contender]]:
    """The contenders in their order, as many together as have room on the card."""
    found: list[list[Contender]] = []
    left = 0.0
    for one in contenders:
        needed = table_of(one[2], card).device_bytes * (1 if one[1] == "memconsole" else PEERS_NEED)
        if not found or needed > left or len(found[-1]) == AT_ONCE:
            found.append([])
            left = SPARE * card.total_bytes
        found[-1].append(one)
        left -= needed
    return found


def table(results: dict[str, Any]) -> str:
    """A row for each contender; ratios are to the first peer of the case that ran."""
    rows = [["work", "by", "tokens/s", "to the peer's", "of the peak rate"]]
    rows[0] += ["ms a step", "estimated", "MiB", "estimated", "to the peer's"]
    for case, found in results.items():
        peers = [r for who, r in found.items() if who in ("nanoGPT", "Trainer") and not _told(r)]
        for who, one in found.items():
            if _told(one):
                rows.append([case, who, one["problem"], *[""] * 7])
                continue
            rate, held = one["tokens_per_second"], one["peak_bytes"]
            ratios = ["", ""]
            if peers:
                ratios[0] = f"{rate / peers[0]['tokens_per_second']:.2f}"
                ratios[1] = f"{held / peers[0]['peak_bytes']:.2f}"
            guesses = ["", ""]
            if "estimated_peak_bytes" in one:
                guesses[0] = f"{1000 * one['estimated_step_seconds']:,.0f}"
                guesses[1] = f"{one['estimated_peak_bytes'] / 2**20:,.0f}"
            row = [case, who, f"{rate:,.0f}", ratios[0], f"{one['flops_utilization']:.1%}"]
            row += [f"{1000 * one['step_seconds']:,.0f}", guesses[0]]
            rows.append([*row, f"{held / 2**20:,.0f}", guesses[1], ratios[1]])
    return markdown(rows, left=2)


def _told(one: dict[str, Any]) -> bool:
    return "problem" in one


def _rehearsed(folder: Path) -> tuple[Case, ...]:
    """The small cases, with their model's directory."""
    shape = {"model_type": "gpt2", "vocab_size": 257, "n_embd": 32, "n_layer": 2, "n_head": 2}
    folder.joinpath("config.json").write_text(json.dumps(shape | {"n_positions": 64}))
    return tuple(
        msgspec.structs.replace(c, settings=tuple(s.replace("{gpt2}", str(folder)) for s in c.settings))
        for c in REHEARSED
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--ladder", action="store_true", help="a 3B model, rung by rung")
    parser.add_argument("--only", default="", metavar="WORDS", help="work whose name has them")
    options = parser.parse_args()
    # For the processes that are started here, where memconsole is not installed.
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([*PLACES, *([before] if before else [])])
    if options.device == "cpu":
        with tempfile.TemporaryDirectory() as folder:
            results: Results = {}
            measure(_rehearsed(Path(folder)), "cpu", 4, card_of("cpu"), results, lambda found: None)
            print(table(results))
        return
    if not (shutil.which("nvidia-smi") or Path("/dev/nvidiactl").exists()):
        sys.exit("no NVIDIA card on this machine; --device cpu rehearses with small models")
    card = card_of("cuda")
    facts = {
        "command": "python tests/bench/gpu.py",
        **machine(),
        "card": card.name,
        "driver": driver(),
    }
    earlier = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if earlier and earlier["card"] != card.name:
        sys.exit(
            f"{RESULTS} is of a {earlier['card']}, and this is a {card.name}: move it away first"
        )

    def keep(found: Results) -> None:
        RESULTS.write_text(json.dumps(facts | {"results": found}, indent=1) + "\n")
        into_page(PAGE, "card", table(found))

    cases = tuple(c for c in (ladder() if options.ladder else CASES) if options.only in c.name)
    measure(cases, "cuda", STEPS, card, earlier.get("results", {}), keep)


if __name__ == "__main__":
    main()
