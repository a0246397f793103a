"""A run of torch imports its compiler only if it needs it: the import takes a second or two and 100 MB."""

from __future__ import annotations

import subprocess
import sys

import pytest

from memconsole.plan.plan import Plan, replace
from memconsole.plan.training.compiler import imports_compiler

PLAIN = """
import sys, numpy, torch
from memconsole.plan.models.architecture import Architecture
from memconsole.plan.plan import Plan, replace
from memconsole_torch import engine as engines
from memconsole_trainer.data.text.rows.batches import language_batch
from memconsole_trainer.weights.initialize import InitialWeights

torch.set_num_threads(1)
model = Architecture(
    family="llama", vocab_size=32, hidden_size=16, layers=1, heads=2, kv_heads=2, head_size=8,
    intermediate_size=24, max_positions=16,
)
plan = replace(Plan(), {"device.name": "cpu", "data.sequence_length": 8, "train.batch_size": 2})
rows = numpy.zeros((1, 2, 8), numpy.int32)
engine = engines.create(plan, None)
engine.build(plan, model, 20, InitialWeights(model, 0))
engine.evaluate([language_batch(rows, rows)])
engine.train_step(language_batch(rows, rows))
assert engine.take_metrics()[0].loss > 1
assert len(engine.generate([1], 2)) == 2
"""
EVERY = """
import sys, torch
from memconsole.plan.training.compiler import imports_compiler
from memconsole_torch import engine as engines
from memconsole_trainer.weights.initialize import InitialWeights
from tests.training.harness.pairs import ROWS, plan_of, refusal, rows
from tests.training.harness.tiny_models import ARCHITECTURES

torch.set_num_threads(1)
model, trained = ARCHITECTURES["llama"], 0
for key, settings in ROWS.items():
    for place in range(len(settings)):
        choices = dict.fromkeys(ROWS, 0) | {key: place}
        if not refusal("torch", choices) and not imports_compiler(plan := plan_of("torch", choices)):
            engine = engines.create(plan, None)
            engine.build(plan, model, 20, InitialWeights(model, 0))
            engine.train_step(rows(plan, 0))
            trained += 1
assert trained > 25, trained
"""
HEAVY = ("torch._dynamo", "torch._inductor", "torch.distributed.tensor", "sympy")


@pytest.mark.parametrize("script", [PLAIN, pytest.param(EVERY, marks=pytest.mark.slow)])
def test_plans_that_compile_nothing_train_without_the_compiler(script: str) -> None:
    told = f"{script}\nprint([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("change", "imported"),
    [
        ({}, False),
        ({"optimize.optimizer": "adamw-8bit"}, False),
        ({"optimize.compile": True}, True),
        ({"optimize.gradient_checkpointing": "full"}, True),
        ({"model.name": "efficientids"}, True),
        ({"device.count": 2}, True),
    ],
)
def test_plans_that_compile_or_recompute_import_it(
    change: dict[str, object], imported: bool
) -> None:
    assert imports_compiler(replace(Plan(), change)) is imported
