"""A training step of a small mixture of experts, beside that of a decoder whose one MLP is as wide as the picked experts
together.

    python tests/bench/experts.py [jax | torch]

Seconds are the processor's, so that other programs on the machine slow both alike; each is the least of several steps.
The optimizer updates all experts, so that small batches cost more than their products.
"""

from __future__ import annotations

import importlib
import sys
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from memconsole.plan.models.architecture import Architecture
from memconsole.plan.plan import Plan, replace
from memconsole_trainer.data.text.rows.batches import language_batch
from memconsole_trainer.weights.initialize import InitialWeights
from tests.bench.trained import markdown

SHAPES = ((256, 16, 4), (128, 64, 8))
"""Inner size of an expert, experts, and those that a token goes to."""
BATCHES = ((16, 256), (4, 256), (1, 128))
"""Rows and their lengths."""
STEPS = 5
VOCABULARY = 2048


def decoder(inner: int, experts: int = 0, picked: int = 0) -> Architecture:
    return Architecture(
        family="llama",
        vocab_size=VOCABULARY,
        hidden_size=256,
        layers=4,
        heads=8,
        kv_heads=4,
        head_size=32,
        intermediate_size=inner,
        experts=experts,
        experts_per_token=picked,
        max_positions=2048,
        tied_embeddings=False,
    )


def step_seconds(backend: str, a: Architecture, rows: int, length: int) -> float:
    """Processor seconds of a step in fp32."""
    settings = {
        "backend": backend,
        "device.name": "cpu",
        "data.sequence_length": length,
        "train.batch_size": rows,
        "train.sample_tokens": 0,
        "train.warmup_steps": 0,
    }
    plan = replace(Plan(), settings)
    engine = importlib.import_module(f"memconsole_{backend}.engine").create(plan, None)
    engine.build(plan, a, STEPS, InitialWeights(a, 0))
    draw, found = np.random.default_rng(0), []
    for _ in range(STEPS):
        tokens = draw.integers(0, VOCABULARY, (1, rows, length), dtype=np.int32)
        began = time.process_time()
        engine.train_step(language_batch(tokens, tokens))
        engine.take_metrics()
        found.append(time.process_time() - began)
    return min(found[1:])


def main() -> None:
    backend = sys.argv[1] if len(sys.argv) > 1 else "jax"
    table = [["experts", "tokens", "one MLP, tokens/s", "experts, tokens/s", "times the seconds"]]
    for inner, experts, picked in SHAPES:
        for rows, length in BATCHES:
            tokens = rows * length
            one = step_seconds(backend, decoder(inner * picked), rows, length)
            many = step_seconds(backend, decoder(inner, experts, picked), rows, length)
            cells = (f"{picked} of {experts} x {inner}", f"{tokens:,}")
            rates = (f"{tokens / one:,.0f}", f"{tokens / many:,.0f}", f"{many / one:.2f}")
            table.append([*cells, *rates])
    print(markdown(table))


if __name__ == "__main__":
    main()
