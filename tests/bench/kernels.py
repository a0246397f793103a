"""Triton kernels beside torch's own operations on a GPU: whether both find the same, and their milliseconds.

AdamW updates 201 M elements, rounding a slice of 4 M, a decoded matrix has 25 M, and the loss 16,384 tokens of 50,304
columns.

    python tests/bench/kernels.py              needs a GPU and Triton; writes results/kernels.json and docs/speed.md
    TRITON_INTERPRET=1 python tests/bench/kernels.py --device cpu    the same on small tensors, interpreted; writes nothing

Ends with 1 where they differ by more than rounding.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "backends")]

import numpy as np
import torch
from torch import Tensor

from memconsole_torch.kernels import launch
from memconsole_torch.kernels.loss import in_place_cross_entropy
from memconsole_torch.models.codes import decoded
from memconsole_torch.techniques.activations import fused_loss
from memconsole_torch.techniques.optimizer.quantized_adam import QuantizedAdamW
from memconsole_torch.techniques.optimizer.stochastic import round_into
from memconsole_trainer.techniques.base_storage import quantize
from tests.bench.trained import into_page, machine, markdown

RESULTS = Path(__file__).with_name("results") / "kernels.json"
PAGE = ROOT / "docs" / "speed.md"
SETTLING, COUNTED = 3, 10
MATRIX = {"cuda": (8192, 3072), "cpu": (64, 96)}
MATRICES = 8
"""Of AdamW, as one weight."""
SLICE = {"cuda": 2**22, "cpu": 2**12}
TOKENS = {"cuda": (16_384, 50_304), "cpu": (16, 320)}

EXACT = frozenset({"stochastic rounding", "int8 to bf16", "NF4 to bf16"})
"""Works that give the same bits on a GPU."""

Found = dict[str, Tensor]
"""What a work leaves, by name."""


def adamw(device: str) -> Callable[[], Found]:
    shape = MATRICES, *MATRIX[device]
    p = torch.nn.Parameter(_drawn(shape, device))
    p.grad = _drawn(shape, device) * 1e-3
    settings = {"params": [p], "lr": 1e-4, "weight_decay": 0.1}
    rule = QuantizedAdamW([settings], (0.9, 0.95), 1e-8, [p])

    def work() -> Found:
        rule.step()
        return {"weight": p.detach(), **rule.state[p]}

    return work


def rounding(device: str) -> Callable[[], Found]:
    wide = _drawn((SLICE[device],), device)
    narrow = torch.empty_like(wide, dtype=torch.bfloat16)

    def work() -> Found:
        round_into(narrow, wide, (123456789, 3987654321), 0)
        return {"weight": narrow}

    return work


def decoding(storage: Any, device: str) -> Callable[[], Found]:
    shape = MATRIX[device]
    matrix = np.random.default_rng(0).standard_normal(shape, np.float32)
    codes, scales = (torch.from_numpy(part).to(device) for part in quantize(matrix, storage))
    return lambda: {"matrix": decoded(codes, scales, shape, torch.bfloat16)}


def loss(device: str) -> Callable[[], Found]:
    rows, columns = TOKENS[device]
    scores = _drawn((rows, columns), device).bfloat16()
    vocabulary = columns - 47
    targets = torch.arange(rows, device=device) * 7919 % vocabulary

    def work() -> Found:
        if launch.runs_on(scores.device):
            nats = in_place_cross_entropy(scores, targets, 1e-3, vocabulary, None, True)
        else:
            wide = scores[:, :vocabulary].float()
            nats = fused_loss._in_place_cross_entropy(wide, targets, 1e-3, True, None)
            scores[:, :vocabulary], scores[:, vocabulary:] = wide.bfloat16(), 0.0
        return {"nats": nats, "slopes": scores}

    return work


WORKS: dict[str, Callable[[str], Callable[[], Found]]] = {
    "8-bit AdamW": adamw,
    "stochastic rounding": rounding,
    "int8 to bf16": lambda device: decoding("int8", device),
    "NF4 to bf16": lambda device: decoding("nf4", device),
    "loss and its gradient, bf16": loss,
}


def _drawn(shape: tuple[int, ...], device: str) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device)


def differs(one: Tensor, other: Tensor, exact: bool) -> float:
    """The share of elements that differ; if not `exact`, by more than rounding, and of codes by more than one."""
    if exact:
        return float((one != other).float().mean())
    if one.dtype == torch.uint8:
        apart = (one.int() - other.int()).abs()
        return float((apart > 1).float().mean())
    tolerance = 2**-6 if one.dtype == torch.bfloat16 else 1e-4
    wide, close = one.float(), torch.tensor(tolerance, device=one.device)
    return float(((wide - other.float()).abs() > close * wide.abs() + 1e-7).float().mean())


def milliseconds(work: Callable[[], object], device: str) -> float:
    for _ in range(SETTLING):
        work()
    _wait(device)
    start = time.perf_counter()
    for _ in range(COUNTED):
        work()
    _wait(device)
    return 1000 * (time.perf_counter() - start) / COUNTED


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


@torch.no_grad()  # type: ignore[misc,unused-ignore]
def measured(name: str, device: str) -> dict[str, Any]:
    found, times = [], {}
    for who in ("torch", "Triton"):
        with patch.object(launch, "runs_on", lambda _, own=who == "Triton": own):
            work = WORKS[name](device)
            found.append({key: value.clone() for key, value in work().items()})
            times[who] = milliseconds(work, device)
    first, second = found
    # Triton's interpreter cuts off where a GPU rounds to bf16.
    exact = device == "cuda" and name in EXACT
    return {**times, "differs": max(differs(first[key], second[key], exact) for key in first)}


def table(results: dict[str, dict[str, Any]]) -> str:
    rows = [["work", "torch, ms", "Triton, ms", "times"]]
    for name, one in results.items():
        one_by_other = f"{one['torch'] / one['Triton']:.1f}"
        rows.append([name, f"{one['torch']:.2f}", f"{one['Triton']:.2f}", one_by_other])
    return markdown(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    device = parser.parse_args().device
    if device == "cuda" and not torch.cuda.is_available():
        sys.exit("no GPU here; TRITON_INTERPRET=1 and --device cpu rehearse on small tensors")
    if importlib.util.find_spec("triton") is None:
        sys.exit("Triton is not installed: pip install triton")
    results = {name: measured(name, device) for name in WORKS}
    print(table(results))
    if device == "cuda":
        facts = {"command": "python tests/bench/kernels.py", **machine()}
        card = torch.cuda.get_device_name()
        document = facts | {"card": card, "results": results}
        RESULTS.write_text(json.dumps(document, indent=1) + "\n")
        into_page(PAGE, "kernels", table(results))
    far = [
        name
        for name, one in results.items()
        if one["differs"] > (0 if name in EXACT and device == "cuda" else 1e-3)
    ]
    sys.exit(f"differ: {', '.join(far)}" if far else 0)


if __name__ == "__main__":
    main()
