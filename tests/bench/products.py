"""The rate of the products of a linear layer in fp32: MKL's, which torch takes on its own, and oneDNN's.

    python tests/bench/products.py

GFLOP/s, the median of several seconds, on all cores: forward (x Wᵀ), the gradient of the input (g W) and the gradient
of the weight (gᵀ x). `memconsole.plan.machine.processor.prefers_onednn` names the processors on which oneDNN is faster.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.bench.trained import markdown

SHAPES = (
    (16384, 384, 1536),
    (16384, 1536, 384),
    (4096, 512, 1376),
    (4096, 1376, 512),
    (4096, 512, 512),
)
"""Tokens, inputs and outputs of the layer: those of `tests/bench/peers.py`."""
TIMES = 15


def rate(flops: float, product: Callable[[], object]) -> float:
    """The median GFLOP/s of a product."""
    product()
    seconds = []
    for _ in range(TIMES):
        began = time.perf_counter()
        product()
        seconds.append(time.perf_counter() - began)
    return flops / statistics.median(seconds) / 1e9


def onednn(x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """x (T, K) times matrix (N, K) transposed."""
    found: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, matrix, None, "none", [], "")
    return found


def main() -> None:
    rows = [["tokens, inputs, outputs"]]
    rows[0] += [f"{what}, {who}" for what in ("x Wᵀ", "g W", "gᵀ x") for who in ("MKL", "oneDNN")]
    for tokens, inputs, outputs in SHAPES:
        x, weight = torch.randn(tokens, inputs), torch.randn(outputs, inputs)
        gradient, flops = torch.randn(tokens, outputs), 2.0 * tokens * inputs * outputs
        pairs = ((x, weight), (gradient, weight.T), (gradient.T, x.T))
        cells = [f"{tokens}, {inputs}, {outputs}"]
        for left, right in pairs:
            cells.append(f"{rate(flops, lambda a=left, b=right: a @ b.T):,.0f}")
            cells.append(f"{rate(flops, lambda a=left, b=right: onednn(a, b)):,.0f}")
        rows.append(cells)
    print(markdown(rows))


if __name__ == "__main__":
    main()
