"""The time of an 8-bit AdamW step in torch on one thread, beside torch's fused fp32 AdamW, and of its parts.

    python tests/bench/eight_bit.py [--rounds 10]

The two take turns. Shown is processor time for each element, the least of the rounds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from memconsole_torch.techniques.optimizer.quantized_adam import (
    CPU_SLICE,
    Buffers,
    QuantizedAdamW,
    factors_of,
)

SHAPES = [(512, 512)] * 32 + [(1408, 512)] * 32
"""The matrices of a Llama of 31 M parameters."""
BETAS, EPSILON = (0.9, 0.95), 1e-8


def weights() -> list[torch.nn.Parameter]:
    """Weights with gradients, the same at each call."""
    generator = torch.Generator().manual_seed(0)
    made = [torch.nn.Parameter(0.02 * torch.randn(s, generator=generator)) for s in SHAPES]
    for p in made:
        p.grad = 1e-3 * torch.randn(p.shape, generator=generator)
    return made


def least(works: dict[str, Callable[[], object]], rounds: int, elements: int) -> dict[str, float]:
    """Nanoseconds of processor time for each element."""
    found = dict.fromkeys(works, float("inf"))
    for _ in range(rounds):
        for name, work in works.items():
            start = time.thread_time()
            work()
            found[name] = min(found[name], (time.thread_time() - start) / elements * 1e9)
    return found


def parts(rounds: int) -> dict[str, float]:
    """The parts of the update of one slice, in buffers that are reused as in a step."""
    buffers, n = Buffers(torch.device("cpu"), CPU_SLICE), CPU_SLICE
    p = torch.nn.Parameter(torch.randn(n))
    rule = QuantizedAdamW([{"params": [p]}], BETAS, EPSILON, [p])
    state, factors = rule.state[p], factors_of(rule.param_groups[0] | {"count": 1})
    slots = [("first", True), ("second", False)]
    second, first = buffers.views(n).moments

    def dequantize() -> None:
        for name, signed in slots:
            buffers.dequantize(state[f"{name}_codes"], state[f"{name}_scales"], signed=signed)

    def quantize() -> None:
        for name, signed in slots:
            buffers.quantize(state[f"{name}_codes"], state[f"{name}_scales"], signed=signed)

    def update() -> None:
        buffers._adamw(p.detach(), gradient, first, second, factors)

    gradient = torch.randn(n)
    works = {"codes to fp32": dequantize, "the update": update, "fp32 to codes": quantize}
    return least(works, 10 * rounds, n)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    wide, narrow = weights(), weights()
    fused = torch.optim.AdamW(wide, lr=1e-4, betas=BETAS, fused=True)
    eight = QuantizedAdamW([{"params": narrow, "lr": 1e-4}], BETAS, EPSILON, narrow)
    works = {"fused fp32 AdamW": fused.step, "8-bit AdamW": eight.step}
    found = least(works, rounds, sum(p.numel() for p in wide))
    one, other = found.values()
    for name, nanoseconds in (found | parts(rounds)).items():
        print(f"{name:18s} {nanoseconds:5.2f} ns")
    print(f"8-bit takes {other / one:.1f} times as long")


if __name__ == "__main__":
    with torch.no_grad():
        main()
