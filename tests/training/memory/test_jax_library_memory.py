"""What XLA's libraries take on a CPU beside XLA's plan: an engine's own process, measured."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from memconsole.memory.activations.jax_step import CPU_CHUNKS, CPU_SCORE_BYTES, library_bytes
from memconsole.memory.state.step_sizes import step_of
from memconsole.plan.models.architecture import Architecture
from memconsole.plan.plan import Plan, replace
from memconsole.runs.act.environment import trainer_environment
from memconsole.units import MIB

pytest.importorskip("jax")

MODEL = Architecture(
    family="llama", vocab_size=512, hidden_size=64, layers=2, heads=4, kv_heads=4, head_size=16,
    intermediate_size=128, max_positions=1024, tied_embeddings=True,
)  # fmt: skip
PLAN = replace(
    Plan(),
    {
        "backend": "jax",
        "device.name": "cpu",
        "data.sequence_length": 1024,
        "train.batch_size": 2,
        "optimize.fused_loss": True,
        "optimize.gradient_checkpointing": "full",
    },
)
PROGRAM = """
import sys
import numpy as np
from memconsole_jax import engine
from memconsole_jax.models import attention
from memconsole_jax.tracing import trace, trace_targets
from memconsole_trainer.data.text.rows.batches import language_batch
from memconsole_trainer.weights.initialize import InitialWeights
from tests.training.memory.test_jax_library_memory import MODEL, PLAN

attention.CPU_SCORE_BYTES, attention.CPU_CHUNKS = map(int, sys.argv[1:])
made = engine.create(PLAN, None)
made.build(PLAN, MODEL, 10, InitialWeights(MODEL, 0))
tokens = np.zeros((1, 2, 1024), np.int32)
batch = language_batch(tokens, tokens)
for step in range(3):
    made.train_step(batch)
    made.take_metrics()
    if step == 1:  # compiled
        made.reset_peak()
planned = trace.planned_step(PLAN, MODEL, trace_targets.target("", "cpu"))
print(made.memory().peak_bytes, planned.needed)
"""


def peaks(score_bytes: int, chunks: int) -> tuple[int, int]:
    """Measured, and planned by XLA, with chunks of attention's scores of so many bytes, and at least so many."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(score_bytes), str(chunks)],
        capture_output=True,
        text=True,
        check=True,
        env=trainer_environment(PLAN, os.environ),
    )
    measured, planned = done.stdout.split()
    return int(measured), int(planned)


def test_small_chunks_of_scores_save_what_reductions_take_beside_the_plan() -> None:
    """How much that is depends on the width of the processor's vectors: the band allows for it."""
    small, planned_small = peaks(CPU_SCORE_BYTES, CPU_CHUNKS)
    large, planned_large = peaks(32 * MIB, 1)
    assert small < 0.5 * large
    taken = library_bytes(step_of(PLAN, MODEL, "cpu"))
    assert 0.6 * taken < small - planned_small < taken + 40 * MIB
    assert large - planned_large > 2 * taken, "what the plan alone would not tell"
