"""What XLA's libraries take on a CPU beside XLA's plan: an engine's own process, measured."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from memconsole.memory.activations.jax_packing import library_bytes
from memconsole.memory.state.step_sizes import step_of
from memconsole.plan.models.architecture import Architecture
from memconsole.plan.plan import Plan, replace
from memconsole.runs.act.environment import trainer_environment
from memconsole.units import MIB

pytest.importorskip("jax")

MODEL = Architecture(
    family="llama", vocab_size=512, hidden_size=384, layers=2, heads=6, kv_heads=6, head_size=64,
    intermediate_size=1024, max_positions=512, tied_embeddings=True,
)  # fmt: skip
PLAN = replace(
    Plan(),
    {
        "backend": "jax",
        "device.name": "cpu",
        "data.sequence_length": 512,
        "train.batch_size": 8,
        "optimize.fused_loss": True,
        "optimize.gradient_checkpointing": "full",
    },
)
PROGRAM = """
import numpy as np
from memconsole_jax import engine
from memconsole_jax.tracing import trace_targets
from memconsole_trainer.data.text.rows.batches import language_batch
from memconsole_trainer.weights.initialize import InitialWeights
from tests.training.harness.planned_step import planned_step
from tests.training.memory.test_jax_library_memory import MODEL, PLAN

made = engine.create(PLAN, None)
made.build(PLAN, MODEL, 10, InitialWeights(MODEL, 0))
tokens = np.zeros((1, 8, 512), np.int32)
batch = language_batch(tokens, tokens)
for step in range(3):
    made.train_step(batch)
    made.take_metrics()
    if step == 1:  # compiled
        made.reset_peak()
planned = planned_step(PLAN, MODEL, trace_targets.target("", "cpu"))
print(made.memory().peak_bytes, planned.needed)
"""


def test_products_pack_their_operands_beside_the_plan() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        check=True,
        env=trainer_environment(PLAN, os.environ),
    )
    measured, planned = map(int, done.stdout.split())
    packed = library_bytes(step_of(PLAN, MODEL, "cpu"))
    assert packed > 15 * MIB
    assert 0.5 * packed < measured - planned < packed + 20 * MIB
