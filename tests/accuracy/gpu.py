"""Everything there is to measure on one NVIDIA card, in under eight minutes.

    python tests/accuracy/gpu.py                 needs a card; writes results/gpu.json
    python tests/accuracy/gpu.py --device cpu    the same flow on small models, where there is none; writes nothing

Each plan trains a few steps of a model of the catalog, with weights that are all zero, in a process of its own
with a time limit; meanwhile the tracers answer for the same plans on the processor. Compared are torch's
`=` and `~` with max_memory_allocated, its replay of the allocator with max_memory_reserved, the device column
with what NVML charges the process, and JAX's `~` and `=` with memory_stats().
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from memconsole.devices.budget import budget as budget_of
from memconsole.devices.probe import read_once
from memconsole.memory.coefficients import runtime
from memconsole.memory.estimate import table_of
from memconsole.memory.exact.timeline import Exact, TracerAnswer, TracerQuestion
from memconsole.memory.table import MemoryTable
from memconsole.plan.check import check
from memconsole.plan.machine.budget import Budget
from memconsole.plan.plan import Plan, apply_settings, uncompiled
from memconsole.plan.plan_file import dumps
from memconsole.runs.act.environment import trainer_environment
from tests.accuracy.results import MIB, Bar, Case, Errors, Part, unavailable, write

TOTAL_SECONDS = 450
RUN_SECONDS = 90
TRACE_SECONDS = 240
TRACERS = 3
"""Of each backend."""
RUNNERS = 6
SPARE = 0.92
"""Of the card: plans estimated to need more are left out, and runs at the same time are estimated to need no more."""

LORA = "optimize.freeze_base=true"
PLANS: dict[str, tuple[str, ...]] = {
    "gpt2 fp32": ("model.name=gpt2", "train.batch_size=8", "data.sequence_length=1024"),
    "gpt2 bf16": ("model.name=gpt2", "train.batch_size=8", "data.sequence_length=1024", "optimize.precision=bf16"),
    "gpt2 bf16 selective": ("model.name=gpt2", "train.batch_size=8", "data.sequence_length=1000", "optimize.precision=bf16", "optimize.gradient_checkpointing=selective"),
    "gpt2 chunked, accumulation": ("model.name=gpt2", "train.batch_size=4", "data.sequence_length=1024", "optimize.fused_loss=true", "optimize.accumulation_steps=4"),
    "gpt2-medium 8-bit full": ("model.name=gpt2-medium", "train.batch_size=4", "data.sequence_length=512", "optimize.optimizer=adamw-8bit", "optimize.gradient_checkpointing=full"),
    "smollm2-360m lion": ("model.name=smollm2-360m", "train.batch_size=2", "data.sequence_length=2048", "optimize.precision=bf16", "optimize.optimizer=lion"),
    "qwen3-0.6b chunked": ("model.name=qwen3-0.6b", "train.batch_size=2", "data.sequence_length=1024", "optimize.precision=bf16", "optimize.fused_loss=true"),
    "llama-3.2-1b bf16": ("model.name=llama-3.2-1b", "train.batch_size=2", "data.sequence_length=1024", "optimize.precision=bf16"),
    "llama-3.2-1b bf16 full": ("model.name=llama-3.2-1b", "train.batch_size=2", "data.sequence_length=2048", "optimize.precision=bf16", "optimize.gradient_checkpointing=full"),
    "llama-3.2-1b 8-bit chunked full": ("model.name=llama-3.2-1b", "train.batch_size=4", "data.sequence_length=1024", "optimize.precision=bf16", "optimize.gradient_checkpointing=full", "optimize.optimizer=adamw-8bit", "optimize.fused_loss=true"),
    "llama-3.2-1b LoRA": ("model.name=llama-3.2-1b", "train.batch_size=2", "data.sequence_length=1024", "optimize.precision=bf16", "optimize.lora_rank=16", LORA, "optimize.fused_loss=true"),
    "gpt2 bf16 compiled": ("model.name=gpt2", "train.batch_size=8", "data.sequence_length=1024", "optimize.precision=bf16", "optimize.compile=true"),
    "gpt2 fp16, muon": ("model.name=gpt2", "train.batch_size=4", "data.sequence_length=1024", "optimize.precision=fp16", "optimize.optimizer=muon"),
    "gpt2-medium bf16, activation offload": ("model.name=gpt2-medium", "train.batch_size=4", "data.sequence_length=1024", "optimize.precision=bf16", "optimize.activation_offload=true"),
    "gpt2-medium bf16, optimizer offload": ("model.name=gpt2-medium", "train.batch_size=4", "data.sequence_length=1024", "optimize.precision=bf16", "optimize.optimizer_offload=pinned"),
    "gpt2-medium bf16, update in backward": ("model.name=gpt2-medium", "train.batch_size=4", "data.sequence_length=1024", "optimize.precision=bf16", "optimize.optimizer_in_backward=true", "train.grad_clip=0"),
    "llama-3.2-1b LoRA on NF4": ("model.name=llama-3.2-1b", "train.batch_size=4", "data.sequence_length=1024", "optimize.precision=bf16", "optimize.lora_rank=16", LORA, "optimize.fused_loss=true", "optimize.base_storage=nf4", "optimize.gradient_checkpointing=full"),
    "recommender": ("model.name=efficientids-llama-3.2-1b", "model.items=20000", "data.source=ratings", "data.sequence_length=128", "train.batch_size=8", "optimize.precision=bf16", "optimize.freeze_base=true"),
    "regressor": ("model.name=lqr", "data.source=lqr", "data.sequence_length=32", "train.batch_size=4096"),
    "gemma-3-1b LoRA full": ("model.name=gemma-3-1b", "train.batch_size=1", "data.sequence_length=1024", "optimize.precision=bf16", "optimize.lora_rank=8", LORA, "optimize.gradient_checkpointing=full", "optimize.fused_loss=true"),
}  # fmt: skip
JAX_PLANS = (
    "gpt2 fp32",
    "gpt2 bf16",
    "gpt2-medium 8-bit full",
    "qwen3-0.6b chunked",
    "llama-3.2-1b bf16 full",
    "llama-3.2-1b LoRA",
    "recommender",
    "regressor",
)
REHEARSED: dict[str, tuple[str, ...]] = {
    "stories": ("model.target_params=1_000_000", "train.batch_size=4"),
    "recommender": ("model.name=efficientids", "model.items=300", "data.source=ratings", "data.sequence_length=32"),
    "regressor": ("model.name=lqr", "data.source=lqr", "data.sequence_length=32"),
    "stories LoRA bf16": ("model.target_params=1_000_000", "train.batch_size=4", "optimize.precision=bf16", "optimize.lora_rank=8", LORA),
}  # fmt: skip


class Measured(msgspec.Struct):
    """One plan: its table, what its process counted, and what the tracer said."""

    name: str
    plan: Plan
    table: MemoryTable
    counted: dict[str, Any]
    exact: Exact | None

    def case(self, estimated: int | None, counted: str) -> Case | None:
        measured = self.counted.get(counted)
        if estimated is None or measured is None:
            return None
        return Case(plan=self.name, estimated_bytes=estimated, measured_bytes=measured)


def plan_of(settings: tuple[str, ...], backend: str) -> Plan:
    """Raises `PlanError`."""
    plan = apply_settings(Plan(), (f"backend={backend}", "data.tokenizer=none", *settings))
    check(plan)
    return plan


def card_bytes(device: str) -> int:
    """Memory that is free on the first card, or in this machine."""
    if device == "cpu":
        import psutil

        return int(psutil.virtual_memory().available)
    import pynvml

    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    except pynvml.NVMLError as error:
        unavailable(f"no NVIDIA card: {error}")
    return int(pynvml.nvmlDeviceGetMemoryInfo(handle).free)


def card(free: int) -> Budget:
    """The first card, as the console sees it, with `free` bytes. Its product decides the matmul libraries' workspaces."""
    found = budget_of(apply_settings(Plan(), ("device.name=cuda:0",)), read_once(30.0))
    return msgspec.structs.replace(found, usable_bytes=free, why="free now")


def processor(free: int) -> Budget:
    """This machine, with `free` bytes."""
    return Budget(
        name="cpu", kind="cpu", memory_label="host RAM", total_bytes=free, usable_bytes=free, why="free now"
    )  # fmt: skip


def ask(plan: Plan, kind: str, product: str) -> Exact | None:
    """The backend's own tracer, for one question; None where it has no answer. XLA compiles for a `product` of the
    catalog."""
    question = TracerQuestion(id=1, plan=dumps(plan), kind=kind, target=product)
    command = [sys.executable, "-m", f"memconsole_{plan.backend}.tracing.trace"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    if plan.backend == "jax":
        environment.pop("CUDA_VISIBLE_DEVICES")
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as tracer:  # fmt: skip
        limit = threading.Timer(TRACE_SECONDS, tracer.kill)
        limit.start()
        assert tracer.stdin is not None
        assert tracer.stdout is not None
        tracer.stdin.write(msgspec.json.encode(question) + b"\n")
        tracer.stdin.flush()
        line = (
            tracer.stdout.readline()
        )  # its input stays open until then: closing it ends the tracer
        limit.cancel()
        tracer.kill()
    if not line:
        return None
    answer = msgspec.json.decode(line, type=TracerAnswer)
    if answer.problem:
        print(f"  {plan.backend}: {answer.problem}", file=sys.stderr)
    return answer.exact


def count(plan: Plan, device: str) -> dict[str, Any] | None:
    """The plan's run in a process of its own; None where it fails or takes too long."""
    kind = "cuda" if device == "cuda" else "cpu"
    environment = trainer_environment(plan, os.environ, kind=kind)
    command = [sys.executable, str(Path(__file__).with_name("gpu_run.py")), device]
    try:
        done = subprocess.run(
            command, input=dumps(plan), env=environment, capture_output=True, text=True,
            timeout=RUN_SECONDS, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        print(f"  took over {RUN_SECONDS} s", file=sys.stderr)
        return None
    if done.returncode:
        print(done.stderr[-1500:], file=sys.stderr)
        return None
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def measure(device: str, seconds: float) -> list[Measured]:
    """Every plan that fits the card, as many at once as have room on it, while the tracers work beside them."""
    start, free = time.monotonic(), card_bytes(device)
    kind = "gpu" if device == "cuda" else "cpu"
    budget = card(free) if device == "cuda" else processor(free)
    product = budget.catalog_name
    plans = PLANS if device == "cuda" else REHEARSED
    wanted = [(name, "torch") for name in plans]
    wanted += [(name, "jax") for name in plans if device == "cpu" or name in JAX_PLANS]
    wanted = [pair for pair in wanted if importlib.util.find_spec(pair[1]) is not None]
    room, end = Room(int(SPARE * free)), start + seconds
    with ExitStack() as stack:
        enter = stack.enter_context
        tracers = {b: enter(ThreadPoolExecutor(TRACERS)) for b in ("torch", "jax")}
        runners = enter(ThreadPoolExecutor(RUNNERS))
        asked: list[tuple[str, Plan, MemoryTable, Future[Exact | None], Future[Any]]] = []
        for name, backend in wanted:
            plan = plan_of(plans[name], backend)
            table = table_of(plan, budget)
            if table.device_bytes > SPARE * free:
                print(f"{backend} {name}: left out, needs {table.device_bytes / MIB:,.0f} MiB")
                continue
            traced = tracers[backend].submit(ask, plan, kind, product)
            counted = runners.submit(room.count, table.device_bytes, plan, device, end)
            asked.append((name, plan, table, traced, counted))
        found = []
        for name, plan, table, traced, counted in asked:
            result = counted.result()
            if result is None:
                print(f"{plan.backend} {name}: failed, or out of time")
                continue
            exact = _within(traced, end)
            one = Measured(name, plan, table, result, exact)
            found.append(one)
            shown = ", ".join(
                f"{key} {value / MIB:,.0f} MiB"
                for key, value in result.items()
                if key.endswith("_bytes") and value is not None
            )
            said = f"{(allocated(one) or 0) / MIB:,.0f}"
            print(
                f"{plan.backend} {name}: {shown}; ~ {table.peak_bytes / MIB:,.0f} MiB, = {said} MiB",
                flush=True,
            )
        for pool in tracers.values():
            pool.shutdown(wait=False, cancel_futures=True)
    print(f"{time.monotonic() - start:.0f} seconds")
    return found


class Room:
    """Memory of the card, which several runs share."""

    def __init__(self, free: int) -> None:
        self._free = free
        self._changed = threading.Condition()

    def count(self, needed: int, plan: Plan, device: str, end: float) -> dict[str, Any] | None:
        """`count`, once there are `needed` bytes; None after `end`, in monotonic seconds."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._free >= needed, end - time.monotonic()):
                return None
            self._free -= needed
        try:
            return count(plan, device) if time.monotonic() < end else None
        finally:
            with self._changed:
                self._free += needed
                self._changed.notify_all()


def _within(answer: Future[Exact | None], end: float) -> Exact | None:
    try:
        return answer.result(timeout=max(1.0, end - time.monotonic()))
    except TimeoutError:
        return None


def allocated(measured: Measured) -> int | None:
    """The exact tier's bytes: the trace, what the formula expects of torch.compile, which is not traced, and the
    libraries' workspace."""
    if measured.exact is None:
        return None
    largest = max(phase.total_bytes for phase in measured.exact.phases.values())
    if measured.plan.optimize.compile:
        eager = table_of(uncompiled(measured.plan), measured.table.budget)
        largest += measured.table.peak_bytes - eager.peak_bytes
    budget = measured.table.budget
    costs = runtime(measured.plan.backend, budget.kind, budget.catalog_name)
    return largest + costs.workspace_bytes


def rows(found: list[Measured]) -> tuple[Errors, ...]:
    """The table's rows that have plans."""
    torch = [m for m in found if m.plan.backend == "torch"]
    jax = [m for m in found if m.plan.backend == "jax"]
    counted, stats = "max_memory_allocated on the card", "memory_stats() on the card"
    made = (
        ("torch =", counted, Bar(within=0.01), [m.case(allocated(m), "allocated_bytes") for m in torch]),
        ("torch ~", counted, Bar(median=0.03, under=0.08), [m.case(m.table.peak_bytes, "allocated_bytes") for m in torch]),
        ("torch = reserved", "max_memory_reserved on the card", Bar(within=0.03), [m.case(m.exact.reserved_bytes if m.exact else None, "reserved_bytes") for m in torch]),
        ("torch ~ device", "NVML's bytes of the process", Bar(), [m.case(m.table.device_bytes, "device_bytes") for m in torch]),
        ("JAX ~ device", "NVML's bytes of the process", Bar(), [m.case(m.table.device_bytes, "device_bytes") for m in jax]),
        ("JAX =", stats, Bar(), [m.case(allocated(m), "allocated_bytes") for m in jax]),
        ("JAX ~", stats, Bar(median=0.05, under=0.10), [m.case(m.table.peak_bytes, "allocated_bytes") for m in jax]),
    )  # fmt: skip
    return tuple(
        Errors(estimate=estimate, truth=truth, bar=bar, cases=tuple(filter(None, cases)))
        for estimate, truth, bar, cases in made
        if any(cases)
    )


def context_note(found: list[Measured]) -> str:
    """What the driver charges beside the allocator, as one sentence."""
    extra = [
        m.counted["device_bytes"] - m.counted["held_bytes"]
        for m in found
        if m.counted.get("device_bytes") and m.counted.get("held_bytes")
    ]
    if not extra:
        return ""
    low, high = min(extra) / MIB, max(extra) / MIB
    return f"CUDA context: {low:,.0f} to {high:,.0f} MiB beside what the allocator holds."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seconds", type=float, default=TOTAL_SECONDS, help="for all plans")
    options = parser.parse_args()
    device = options.device
    if device == "cuda" and not (shutil.which("nvidia-smi") or Path("/dev/nvidiactl").exists()):
        unavailable("no NVIDIA card on this machine")
    found = measure(device, options.seconds)
    if not found:
        sys.exit("nothing was measured")
    part = Part(
        name="gpu", command="python tests/accuracy/gpu.py", rows=rows(found), note=context_note(found)
    )  # fmt: skip
    if device == "cpu":
        print("\n".join(" | ".join(row.cells()) for row in part.rows))
        return
    last = found[-1].counted
    total = found[-1].table.budget.total_bytes / 2**30
    machine = f"{last['device']}, {total:.1f} GiB, driver {last['driver']}"
    versions: dict[str, str] = {}
    for measured in found:
        versions |= measured.counted["versions"]
    write(msgspec.structs.replace(part, versions=versions, machine=machine))


if __name__ == "__main__":
    main()
