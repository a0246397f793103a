"""JAX's formula on a GPU against XLA's own plans."""

from __future__ import annotations

import msgspec
import pytest

from memconsole.memory.activations.jax_gathered import ALIGNED_ROWS
from memconsole.memory.activations.jax_step import moments
from memconsole.memory.estimate import model_of
from memconsole.memory.state.step_sizes import step_of
from memconsole.plan.models.architecture import Architecture
from memconsole.plan.plan import Plan, replace
from tests.accuracy import xla
from tests.accuracy.random_plans import of_family
from tests.accuracy.results import MIB

GPT2 = {"model.name": "gpt2", "train.batch_size": 8, "data.sequence_length": 1024}
MEDIUM = {
    "model.name": "gpt2-medium",
    "train.batch_size": 4,
    "data.sequence_length": 512,
    "optimize.optimizer": "adamw-8bit",
    "optimize.gradient_checkpointing": "full",
}


@pytest.mark.parametrize(
    ("settings", "planned_mib"),
    [(GPT2, 8674), ({**GPT2, "optimize.precision": "bf16"}, 5535), (MEDIUM, 4495)],
)
def test_gpt2_is_estimated_within_6_percent_of_what_xla_plans_on_an_h100(
    settings: dict[str, object], planned_mib: int
) -> None:
    """XLA 0.11.2's plans on the card: the rows `JAX =` of tests/accuracy/results/gpu.json."""
    plan = replace(Plan(), {"backend": "jax", "device.name": "h100-80gb", **settings})
    architecture = model_of(plan)
    assert isinstance(architecture, Architecture)
    peak = max(moment.total for moment in moments(step_of(plan, architecture, "gpu")))
    assert peak / 2**20 == pytest.approx(planned_mib, rel=0.06)


LLAMA = of_family(
    "llama", vocab_size=32_000, hidden_size=1024, layers=6, heads=16, kv_heads=8, head_size=64,
    intermediate_size=2816, max_positions=8192, tied_embeddings=False,
)  # fmt: skip
ADAPTED = {
    "optimize.lora_rank": 8,
    "optimize.freeze_base": True,
    "optimize.gradient_checkpointing": "full",
    "optimize.fused_loss": True,
    "optimize.optimizer": "sgd",
    "data.sequence_length": 1024,
}


@pytest.mark.parametrize(
    ("rows", "precision", "planned_mib"),
    [(4, "fp32", 1134.7), (16, "bf16", 1619.2)],
)
def test_adapters_of_recomputed_blocks_are_estimated_within_7_percent_of_what_xla_plans(
    rows: int, precision: str, planned_mib: float
) -> None:
    """XLA 0.10.2's plans for an H100."""
    changes = {"train.batch_size": rows, "optimize.precision": precision}
    plan = replace(Plan(), {"backend": "jax", "device.name": "h100-80gb", **ADAPTED, **changes})
    assert xla.peak(step_of(plan, LLAMA, "gpu")) / MIB == pytest.approx(planned_mib, rel=0.07)


@pytest.mark.parametrize(
    ("rows", "shape"), [(1024, (50_257, 768)), (1024, (32_000, 768)), (100, (50_257, 768))]
)
def test_a_head_of_any_number_of_rows_is_priced_with_its_padding(
    rows: int, shape: tuple[int, int]
) -> None:
    """A chunk's gradient is copied in fp32 if its columns are no multiple of what products are padded to."""
    vocabulary, hidden = shape
    model = msgspec.structs.replace(LLAMA, vocab_size=vocabulary, hidden_size=hidden, layers=1)
    changes = {"train.batch_size": 1, "data.sequence_length": rows}
    plan = replace(Plan(), {"backend": "jax", "device.name": "h100-80gb", **ADAPTED, **changes})
    loss = next(m for m in moments(step_of(plan, model, "gpu")) if m.phase == "loss")
    logits, head = 4 * rows * vocabulary, 4 * vocabulary * hidden
    padded = vocabulary % ALIGNED_ROWS > 0
    assert loss.logits == (max(2 * logits, logits + head) if padded else logits)
