"""The rate of the products of a linear layer in fp32: MKL's, which torch takes on its own, and oneDNN's.

    python tests/bench/products.py

GFLOP/s, the median of several seconds, on all cores: forward (x Wᵀ), the gradient of the input (g W) and the gradient
of the weight (gᵀ x), whose oneDNN figure is that of `memconsole_torch.models.linear.outer`.
`memconsole.plan.machine.processor` names the processors on which oneDNN is faster.
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

from memconsole_torch.models import linear
from tests.bench.trained import markdown

SHAPES = (
    (16384, 384, 1536),
    (16384, 1536, 384),
    (4096, 512, 1376),
    (4096, 1376, 512),
    (4096, 512, 512),
    (768, 128, 512),
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
    linear._is_faster = linear._is_far_faster = lambda: True
    rows = [["tokens, inputs, outputs"]]
    rows[0] += [f"{what}, {who}" for what in ("x Wᵀ", "g W", "gᵀ x") for who in ("MKL", "oneDNN")]
    for tokens, inputs, outputs in SHAPES:
        x, weight = torch.randn(tokens, inputs), torch.randn(outputs, inputs)
        gradient, flops = torch.randn(tokens, outputs), 2.0 * tokens * inputs * outputs
        products = (
            lambda x=x, w=weight: x @ w.T,
            lambda x=x, w=weight: onednn(x, w),
            lambda g=gradient, w=weight: g @ w,
            lambda g=gradient, w=weight: onednn(g, w.T),
            lambda g=gradient, x=x: g.T @ x,
            lambda g=gradient, x=x: linear.outer(g, x),
        )
        cells = (f"{rate(flops, product):,.0f}" for product in products)
        rows.append([f"{tokens}, {inputs}, {outputs}", *cells])
    print(markdown(rows))


if __name__ == "__main__":
    main()
