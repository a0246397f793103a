"""Runs of the same work by nanoGPT's train.py, by transformers' Trainer and by memconsole."""

from __future__ import annotations

import json
import os
import pickle
import re
import resource
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np

from memconsole.memory.seconds import forward_flops_per_token
from memconsole.plan import catalog
from memconsole.plan.machine import stdlib
from memconsole.plan.plan import Plan, replace
from tests.bench.trained import run

CHARACTERS = 65
"""Entries of the character tokenizer, as many as tiny Shakespeare has."""
TEXT_BYTES = 1_100_000
TRAINER = Path(__file__).with_name("peer_trainer.py")
SETTLING = 2
"""First steps that are not counted."""


class MissingError(Exception):
    """A peer is not installed. The message says which, and how to get it."""


class Speed(msgspec.Struct, frozen=True, kw_only=True):
    """What one run showed."""

    tokens_per_second: float
    """The median over its steps."""
    peak_bytes: int
    """Peak resident memory of the process, frameworks included."""


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """What is trained, prepared for all of them in one folder."""

    place: Path
    shape: dict[str, Any]
    rows: int
    length: int
    steps: int
    bf16: bool


def prepare(
    place: Path, shape: dict[str, Any], rows: int, length: int, steps: int, bf16: bool
) -> Work:
    """Write the text, its characters as a tokenizer and as nanoGPT's files, and the model's config."""
    parts, size = [], 0
    for path in stdlib.files():
        parts.append(path.read_text(encoding="utf-8", errors="ignore"))
        size += len(parts[-1])
        if size > TEXT_BYTES:
            break
    text = "".join(parts)[:TEXT_BYTES]
    counts = sorted(set(text), key=lambda c: (-text.count(c), c))[:CHARACTERS]
    text = "".join(c for c in text if c in frozenset(counts))
    (place / "text").mkdir()
    cut = len(text) * 9 // 10
    for first, part in ((0, text[:cut]), (cut, text[cut:])):  # what is held out begins a file
        for index in range(0, len(part), 10_000):
            name = f"{first + index:08}.txt"
            (place / "text" / name).write_text(part[index : index + 10_000])
    model = place / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(shape))
    numbers = {c: i for i, c in enumerate(counts)}
    bpe = {"type": "BPE", "vocab": numbers, "merges": [], "unk_token": None}
    tokenizer = {"version": "1.0", "added_tokens": [], "model": bpe}
    (place / "tokenizer.json").write_text(json.dumps(tokenizer))
    data = place / "nano" / "data" / "text"
    data.mkdir(parents=True)
    codes = np.array([numbers[c] for c in text], np.uint16)
    codes[:cut].tofile(data / "train.bin")
    codes[cut:].tofile(data / "val.bin")
    (data / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": len(counts)}))
    return Work(place=place, shape=shape, rows=rows, length=length, steps=steps, bf16=bf16)


def flops_per_token(work: Work) -> float:
    """FLOPs of the forward and backward pass, without those that are computed again."""
    plan = replace(Plan(), {"model.name": str(work.place / "model")})
    return 3 * forward_flops_per_token(catalog.architecture(plan), work.length)


def product_rate() -> float:
    """FLOP/s of a large product of fp32 matrices in torch, on all cores: the best of several seconds of MKL's and of
    oneDNN's products."""
    done = subprocess.run(
        [sys.executable, "-c", _PRODUCTS], stdout=subprocess.PIPE, text=True, check=True
    )
    return float(done.stdout)


_PRODUCTS = """
import time, torch
a, b = torch.randn(2048, 2048), torch.randn(2048, 2048)
products = [lambda: torch.mm(a, b)]
if torch.backends.mkldnn.is_available():
    products.append(lambda: torch.ops.mkldnn._linear_pointwise(a, b, None, "none", [], ""))
best, end = 0.0, time.perf_counter() + 6
while time.perf_counter() < end:
    for product in products:
        began = time.perf_counter()
        product()
        best = max(best, 2 * 2048**3 / (time.perf_counter() - began))
print(best)
"""


def ours(work: Work, backend: str, parts: int = 1) -> Speed:
    """A run of memconsole, launched as a person launches it, whose steps take their rows in `parts` micro-batches."""
    split = {"train.batch_size": work.rows // parts, "optimize.accumulation_steps": parts}
    report = run(settings(work, backend) | split)
    speeds = [step["tokens_per_second"] for step in report["steps"][SETTLING:]]
    return Speed(
        tokens_per_second=statistics.median(speeds),
        peak_bytes=report["memory"]["measured"]["host_bytes"],
    )


def settings(work: Work, backend: str) -> dict[str, object]:
    """What the plan of memconsole's run sets."""
    characters = work.shape["vocab_size"] == CHARACTERS
    changes: dict[str, object] = {
        "backend": backend,
        "device.name": "cpu",
        "model.name": work.place / "model",
        "data.source": work.place / "text",
        "data.sequence_length": work.length,
        "train.batch_size": work.rows,
        "train.max_steps": work.steps,
        "train.log_every": 1,
        "train.warmup_steps": 1,
        "train.evaluation_batches": 1,
        "train.sample_tokens": 0,
        "optimize.precision": "bf16" if work.bf16 else "fp32",
    }
    if characters:
        changes["data.tokenizer"] = work.place / "tokenizer.json"
    return changes


def nanogpt(work: Work, others: Mapping[str, object] = MappingProxyType({})) -> Speed:
    """A run of nanoGPT's own train.py, with its flags for a CPU and `others`. Raises `MissingError`."""
    source = os.environ.get("NANOGPT_DIR", "")
    if not source or not (Path(source) / "train.py").is_file():
        raise MissingError("NANOGPT_DIR names no checkout of nanoGPT")
    place, shape = work.place / "nano", work.shape
    for name in ("train.py", "model.py", "configurator.py"):
        shutil.copy(Path(source) / name, place)
    flags = {
        "dataset": "text", "device": "cpu", "compile": False, "dtype": "float32",
        "eval_interval": 10**9, "eval_iters": 1, "log_interval": 1, "dropout": 0.0,
        "gradient_accumulation_steps": 1, "bias": True, "block_size": work.length, "batch_size": work.rows,
        "n_layer": shape["n_layer"], "n_head": shape["n_head"], "n_embd": shape["n_embd"],
        "max_iters": work.steps, **others,
    }  # fmt: skip
    command = [sys.executable, "train.py", *(f"--{key}={value}" for key, value in flags.items())]
    output, peak = _watched(command, place)
    seconds = [float(ms) / 1e3 for ms in re.findall(r"^iter \d+: .*time ([\d.]+)ms", output, re.M)]
    typical = statistics.median(seconds[SETTLING:])
    return Speed(tokens_per_second=work.rows * work.length / typical, peak_bytes=peak)


def trainer(work: Work) -> Speed:
    """A run of transformers' Trainer. Raises `MissingError`."""
    known = subprocess.run(
        [sys.executable, "-c", "import transformers, accelerate"], capture_output=True, check=False
    )
    if known.returncode:
        raise MissingError("transformers or accelerate is not installed")
    wanted = [
        work.place / "model" / "config.json",
        work.rows,
        work.length,
        work.steps,
        int(work.bf16),
    ]
    command = [sys.executable, str(TRAINER), *(str(word) for word in wanted)]
    output, peak = _watched(command, work.place)
    seconds = json.loads(output.splitlines()[-1])[SETTLING:]
    typical = statistics.median(seconds)
    return Speed(tokens_per_second=work.rows * work.length / typical, peak_bytes=peak)


PEERS: dict[str, Callable[[Work], Speed]] = {"nanoGPT": nanogpt, "Trainer": trainer}


def _watched(command: list[str], place: Path) -> tuple[str, int]:
    """The output of a command and the peak resident bytes of its process. Raises `RuntimeError`."""
    with open(place / "output.txt", "w+", encoding="utf-8") as output:
        process = subprocess.Popen(
            command, cwd=place, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
        )
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        text = output.read()
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}:\n{text[-2000:]}")
    return text, _bytes(used)


def _bytes(used: resource.struct_rusage) -> int:
    return used.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
