"""What each optimization saves and costs: short real runs with and without it, estimate beside measurement.

    python tests/bench/optimizations.py [--backend torch|jax] [--only WORD] [--print]

Memory is what the run itself reports (on a CPU, growth of anonymous memory since just before the model was
built), speed the middle of its last steps, relative to the plain run of the same backend. What a row saves
is held against measurements of the same model in hand-written training loops, which `REFERENCE` keeps. These loops
began to count after the model was made (in JAX: after the optimizer state too), so that those bytes are subtracted first.
Results go to results/optimizations.json and the table in docs/optimizations.md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from memconsole.memory.estimate import model_of
from memconsole.memory.state.step_sizes import step_of
from memconsole.plan.plan import Plan, replace
from tests.bench.trained import (
    BACKENDS,
    RefusedError,
    Settings,
    into_page,
    machine,
    markdown,
    run,
)

RESULTS = Path(__file__).with_name("results") / "optimizations.json"
PAGE = ROOT / "docs" / "optimizations.md"
"""Shows the table."""
MIB = 2**20
STEPS = 6

MODELS = {
    "GPT 13.9 M": {"n_embd": 384, "n_layer": 6, "n_head": 6},
    "GPT 77.2 M": {"n_embd": 768, "n_layer": 10, "n_head": 12},
}
"""Tied GPT-2 shapes of 8,192 tokens and 256 positions."""
PLAIN: Settings = {
    "data.vocab_size": 8192,
    "data.sequence_length": 256,
    "data.max_examples": 60,
    "data.shuffle_buffer": 1000,
    "train.batch_size": 16,
    "train.max_steps": STEPS,
    "train.log_every": 1,
    "train.warmup_steps": 2,
    "train.evaluation_batches": 1,
    "train.sample_tokens": 0,
    "optimize.heap": "tight",
}
"""With a tight heap, because the rows tell what tensors take."""
FULL: Settings = {"optimize.gradient_checkpointing": "full"}
ATTENTION: Settings = {"optimize.gradient_checkpointing": "attention"}
CHUNKED: Settings = {"optimize.fused_loss": True}
TILED: Settings = {"optimize.tiled_mlp": True}
ADAPTERS: Settings = {
    "model.weights": "random",
    "optimize.lora_rank": 8,
    "optimize.freeze_base": True,
}
IN_BACKWARD: Settings = {"optimize.optimizer_in_backward": True, "train.grad_clip": 0.0}
ROUNDED: Settings = {
    "optimize.precision": "bf16-sr",
    "optimize.optimizer_offload": "compressed",
}
EIGHT: Settings = {"optimize.optimizer": "adamw-8bit"}
APOLLO: Settings = {"optimize.optimizer": "apollo-mini"}
EIGHT_ALL: Settings = {"optimize.optimizer": "adamw8-all"}


def accumulated(steps: int) -> Settings:
    return {"optimize.accumulation_steps": steps, "train.batch_size": 16 // steps}


ALL_ON = "all: checkpointing, chunked, bf16, accumulation 4, 8-bit"
ROWS: dict[str, Settings] = {
    "plain": {},
    "bf16": {"optimize.precision": "bf16"},
    "fp16": {"optimize.precision": "fp16"},
    "bf16 weights, stochastically rounded": {"optimize.precision": "bf16-sr"},
    "bf16 weights and state, stochastically rounded": ROUNDED,
    "checkpointing, selective": {"optimize.gradient_checkpointing": "selective"},
    "checkpointing, attention": ATTENTION,
    "checkpointing, full": FULL,
    "chunked loss": CHUNKED,
    "tiled MLP": TILED,
    "accumulation 4 x 4 rows": accumulated(4),
    "accumulation 16 x 1 row": accumulated(16),
    "8-bit AdamW": EIGHT,
    "8-bit AdamW, embedding too": EIGHT_ALL,
    "Adafactor": {"optimize.optimizer": "adafactor"},
    "Lion": {"optimize.optimizer": "lion"},
    "SGD": {"optimize.optimizer": "sgd"},
    "Muon": {"optimize.optimizer": "muon"},
    "APOLLO-Mini": APOLLO,
    "optimizer in backward": IN_BACKWARD,
    "optimizer offload": {"optimize.optimizer_offload": "pinned"},
    "optimizer offload, compressed": {"optimize.optimizer_offload": "compressed"},
    "activation offload": {"optimize.activation_offload": True},
    "activation offload of checkpoints": {**FULL, "optimize.activation_offload": True},
    "LoRA rank 8": ADAPTERS,
    "LoRA rank 8, int8 base": {**ADAPTERS, "optimize.base_storage": "int8"},
    "LoRA rank 8, nf4 base": {**ADAPTERS, "optimize.base_storage": "nf4"},
    "isolated documents": {"data.isolate_documents": True},
    "32 rows of 128 tokens": {"data.sequence_length": 128, "train.batch_size": 32},
    "torch.compile": {"optimize.compile": True},
    "checkpointing + chunked": {**FULL, **CHUNKED},
    "checkpointing, attention + chunked": {**ATTENTION, **CHUNKED},
    "checkpointing, chunked, tiled MLP": {**FULL, **CHUNKED, **TILED},
    "checkpointing, chunked, accumulation 4": {**FULL, **CHUNKED, **accumulated(4)},
    "checkpointing, chunked, accumulation 4, bf16": {
        **FULL,
        **CHUNKED,
        **accumulated(4),
        "optimize.precision": "bf16",
    },
    "activation offload + chunked": {"optimize.activation_offload": True, **CHUNKED},
    ALL_ON: {
        **FULL,
        **CHUNKED,
        **accumulated(4),
        **EIGHT,
        "optimize.precision": "bf16",
    },
}
UNCHANGED: dict[str, Settings] = {
    "evaluation batch 64": {"train.evaluation_batch_size": 64},
    "stride 128": {"data.stride": 128},
    "dataset limit 30": {"data.max_examples": 30},
    "shuffle buffer 100": {"data.shuffle_buffer": 100},
    "heap as glibc has it": {},
}
"""What a step computes is the plain one's, of other rows at most."""
ENVIRONMENTS = {
    "heap as glibc has it": {
        "MALLOC_ARENA_MAX": str(8 * (os.cpu_count() or 1)),
        "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
        "MALLOC_TRIM_THRESHOLD_": str(64 << 20),
    }
}
"""Instead of what a trainer starts in: here glibc's own limits, its thresholds where they come to rest (mallopt(3))."""
ONE_ROW: Settings = {"train.batch_size": 1}
LARGE: dict[str, Settings] = {
    "plain": {},
    "8-bit AdamW": EIGHT,
    "8-bit AdamW, embedding too": EIGHT_ALL,
    "Adafactor": {"optimize.optimizer": "adafactor"},
    "APOLLO-Mini": APOLLO,
    "bf16 weights, stochastically rounded": {"optimize.precision": "bf16-sr"},
    "bf16 weights and state, stochastically rounded": ROUNDED,
    "bf16 weights and state in backward": {**ROUNDED, **IN_BACKWARD},
    "optimizer in backward": IN_BACKWARD,
    "8-bit AdamW in backward": {**EIGHT, **IN_BACKWARD},
    "8-bit AdamW in backward, checkpointing, chunked": {**EIGHT, **IN_BACKWARD, **FULL, **CHUNKED},
    "LoRA rank 8, nf4 base": {**ADAPTERS, "optimize.base_storage": "nf4"},
}
CASES: dict[str, tuple[Settings, dict[str, Settings]]] = {
    "GPT 13.9 M": ({}, {**ROWS, **UNCHANGED}),
    "GPT 77.2 M": (ONE_ROW, LARGE),
}
REFERENCE: dict[tuple[str, str], dict[str, float]] = {
    ("GPT 13.9 M", "torch"): {
        "plain": 1187,
        "bf16": 958,
        "checkpointing, selective": 941,
        "checkpointing, attention": 617,
        "checkpointing, full": 579,
        "chunked loss": 835,
        "accumulation 4 x 4 rows": 453,
        "accumulation 16 x 1 row": 254,
        "8-bit AdamW, embedding too": 1107,
        "Adafactor": 1083,
        "checkpointing + chunked": 328,
        "checkpointing, chunked, accumulation 4, bf16": 252,
        "activation offload + chunked": 267,
    },
    ("GPT 13.9 M", "jax"): {
        "plain": 1631,
        "checkpointing, full": 475,
        "checkpointing + chunked": 464,
        "checkpointing, attention + chunked": 468,
        "checkpointing, chunked, accumulation 4": 241,
    },
    ("GPT 77.2 M", "torch"): {
        "plain": 965,
        "8-bit AdamW": 597,
        "8-bit AdamW, embedding too": 597,
        "Adafactor": 378,
        "bf16 weights and state, stochastically rounded": 495,
        "optimizer in backward": 795,
        "8-bit AdamW in backward": 397,
        "8-bit AdamW in backward, checkpointing, chunked": 332,
    },
}
"""MB above start in loops of torch 2.13 and JAX 0.10 of the same sizes, on a CPU of 2 cores: weights, in JAX also state,
were there before. Their 8-bit AdamW, bitsandbytes', has the embedding's state in 8 bits: of 13.9 M weights the 80 MB it
saves are 5.8 bytes each. Of the larger model its copies of a whole weight take most of that back."""
SHORTFALL = 0.10
"""By how much a row's saving may fall short of the reference's, unless it holds no more than the reference did: what a leaner
plain run does not take cannot be saved."""
FALLS_SHORT = {("GPT 13.9 M", "torch", "activation offload + chunked")}
"""Rows that save less. On a CPU all activations of a block are read back when its backward pass begins, where the
reference reads each when it is needed."""
TIMES = {"torch": 4.5, "jax": 6.0}
"""How many times less than the plain run all together must hold above start."""
SAME_LOSS = 0.002
"""How far its loss may be from the plain run's, as a share."""


def measured(backend: str, case: str, name: str, model: str) -> dict[str, Any]:
    """One short run of a row; bytes at the peak, estimated and measured, its speed and its last loss."""
    base = {"model.name": model, "backend": backend, "device.name": "cpu"}
    common, rows = CASES[case]
    environment = ENVIRONMENTS.get(name, {})
    report = run({**PLAIN, **base, **common, **rows[name]}, environment)
    steps = [s for s in report["steps"] if s["step"] > 2]
    found = {
        "estimated_bytes": report["memory"]["estimated"]["peak_bytes"],
        "measured_bytes": report["memory"]["measured"]["peak_bytes"],
        "tokens_per_second": statistics.median(s["tokens_per_second"] for s in steps),
        "loss": steps[-1]["loss"],
    }
    return {**found, "environment": environment} if environment else found


def saved(rows: dict[str, Any], name: str) -> float:
    """Share of the plain run's bytes."""
    return 1 - float(rows[name]["measured_bytes"]) / float(rows["plain"]["measured_bytes"])


def saved_above_start(rows: dict[str, Any], case: str, backend: str, name: str) -> float:
    """The same of what comes to the weights (JAX: and to the state)."""
    whole, part = (
        rows[one]["measured_bytes"] - start_bytes(case, backend, one) for one in ("plain", name)
    )
    return 1 - float(part) / float(whole)


@cache
def start_bytes(case: str, backend: str, name: str) -> int:
    """Bytes that are there before the first step where the reference begins to count."""
    common, rows = CASES[case]
    with tempfile.TemporaryDirectory() as folder:
        changes = {**PLAIN, **common, **rows[name], "model.name": config(case, Path(folder))}
        plan = replace(Plan(), {**changes, "backend": backend, "device.name": "cpu"})
        step = step_of(plan, model_of(plan), "cpu")
    return step.weights + (step.state.resident if backend == "jax" else 0)


def config(case: str, folder: Path) -> str:
    """A folder that says what the case's model is."""
    shape = {"model_type": "gpt2", "vocab_size": 8192, "n_positions": 256}
    model = folder / case.replace(" ", "-")
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps({**shape, **MODELS[case]}))
    return str(model)


def expected(case: str, backend: str, name: str) -> float | None:
    """The share that the reference saves."""
    numbers = REFERENCE.get((case, backend), {})
    return 1 - numbers[name] / numbers["plain"] if name in numbers else None


def table(results: dict[str, Any]) -> str:
    """For each model, a row an optimization."""
    parts = []
    for case, (_, names) in CASES.items():
        head = [case]
        for backend in BACKENDS:
            head += [
                f"{backend} MiB",
                "estimate",
                "saves",
                "above start",
                "reference",
                "speed",
                "loss",
            ]
        rows = [head]
        for name in names:
            row = [name]
            for backend in BACKENDS:
                row += _cells(results.get(case, {}).get(backend, {}), case, backend, name)
            rows.append(row)
        parts.append(markdown(rows))
    return "\n\n".join(parts)


def _cells(rows: dict[str, Any], case: str, backend: str, name: str) -> list[str]:
    one = rows.get(name)
    if one is None:
        return ["not measured", *[""] * 6]
    if "refused" in one:
        return ["–", *[""] * 6]
    wanted = expected(case, backend, name)
    return [
        f"{one['measured_bytes'] / MIB:,.0f}",
        f"{one['estimated_bytes'] / one['measured_bytes'] - 1:+.1%}",
        "" if name == "plain" else f"{saved(rows, name):.0%}",
        f"{saved_above_start(rows, case, backend, name):.0%}" if wanted else "",
        f"{wanted:.0%}" if wanted else "",
        f"{one['speed']:.2f}" if one["speed"] else "",
        f"{one['loss']:.4f}",
    ]


def short(results: dict[str, Any]) -> dict[tuple[str, str, str], str]:
    """Rows that save less than the reference by more than `SHORTFALL`, and hold more: what they save and should save."""
    found = {}
    for case, backends in results.items():
        for backend, rows in backends.items():
            for name, one in rows.items():
                wanted = expected(case, backend, name)
                if not wanted or "refused" in one:
                    continue
                share = saved_above_start(rows, case, backend, name)
                above = one["measured_bytes"] - start_bytes(case, backend, name)
                more = above > 1e6 * REFERENCE[case, backend][name]
                if share < wanted * (1 - SHORTFALL) and more:
                    found[case, backend, name] = f"{share:.1%} < {wanted:.1%}"
    return found


def all_on(results: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """By backend, how many times less all together hold above start, and how far the loss is from the plain run's."""
    case = "GPT 13.9 M"
    found = {}
    for backend, rows in results[case].items():
        if ALL_ON in rows:
            losses = rows[ALL_ON]["loss"] / rows["plain"]["loss"]
            times = 1 / (1 - saved_above_start(rows, case, backend, ALL_ON))
            found[backend] = times, abs(losses - 1)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", action="append", choices=BACKENDS)
    parser.add_argument(
        "--only", action="append", help="rows whose name has this in it, and the plain one"
    )
    parser.add_argument("--print", action="store_true", help="the table of what is stored")
    options = parser.parse_args()
    document = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"results": {}}
    results = document["results"]
    if not options.print:
        with tempfile.TemporaryDirectory() as folder:
            _measure_all(options, results, Path(folder), document)
    text = table(results)
    print(text)
    if not options.print:
        into_page(PAGE, "optimizations", text)
    missed = [
        f"saves too little: {', '.join(row)}: {shares}"
        for row, shares in short(results).items()
        if row not in FALLS_SHORT
    ]
    for backend, (times, apart) in all_on(results).items():
        print(f"all on, {backend}: {times:.1f} times less above start, loss {apart:.4%} apart")
        if times < TIMES[backend] or apart > SAME_LOSS:
            missed.append(f"all on, {backend}: not {TIMES[backend]} times less with the same loss")
    if missed:
        sys.exit("\n".join(missed))


def _measure_all(
    options: Any, results: dict[str, Any], folder: Path, document: dict[str, Any]
) -> None:
    for case, (_, names) in CASES.items():
        model = config(case, folder)
        for backend in options.backend or BACKENDS:
            rows = results.setdefault(case, {}).setdefault(backend, {})
            plain: dict[str, Any] = {}  # of the same run: the machine is never as fast again
            for name in names:
                if not any(word in name for word in options.only or [""]) and name != "plain":
                    continue
                try:
                    row = measured(backend, case, name, model)
                    plain = row if name == "plain" else plain
                    row["speed"] = row["tokens_per_second"] / plain["tokens_per_second"]
                    rows[name] = row
                except RefusedError as error:
                    rows[name] = {"refused": str(error)}
                print(case, backend, name, rows[name], file=sys.stderr, flush=True)
                document.update(command="python tests/bench/optimizations.py", **machine())
                RESULTS.parent.mkdir(exist_ok=True)
                RESULTS.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
