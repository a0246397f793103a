"""The trace of one of several torch processes, whose others are imagined, is what such a process holds."""

from __future__ import annotations

import pytest

from memconsole.memory.exact.timeline import Exact, TracerQuestion
from memconsole.plan import catalog
from memconsole.plan.plan import Plan, replace
from memconsole.plan.plan_file import dumps
from memconsole_torch.tracing.trace import Tracer
from memconsole_trainer.weights.checkpoint import SHARD_BYTES
from tests.accuracy import torch_sharded

SETTINGS = {
    "model.target_params": 1_000_000,
    "device.name": "cpu",
    "train.batch_size": 2,
    "data.sequence_length": 32,
}
TRACER = Tracer()


def traced(count: int, sharding: str, kind: str = "cpu", **settings: object) -> Exact:
    changes = {"device.count": count, "optimize.sharding": sharding, **SETTINGS, **settings}
    question = TracerQuestion(id=1, plan=dumps(replace(Plan(), changes)), kind=kind)
    answer = TRACER.answer(question)
    assert answer.exact is not None, answer.problem
    return answer.exact


def sizes() -> list[tuple[int, tuple[int, ...], int | None]]:
    model = catalog.model(replace(Plan(), SETTINGS))
    return [(p.size, p.shape, p.layer) for p in model.parameters()]


@pytest.mark.parametrize("count", [2, 3, 64])
def test_a_process_holds_its_rows_and_the_gathered_blocks(count: int) -> None:
    """Rows are padded to a multiple of the processes. Beside its rows a process has at most two blocks gathered, one
    of them also as it was received, and what is outside the blocks."""
    found = traced(count, "fsdp")
    share = sum(4 * -(-shape[0] // count) * (size // shape[0]) for size, shape, _ in sizes())
    assert found.phases["checkpoint"].components["weights"] == share
    assert found.phases["optimizer step"].components["gradients"] == share
    state = found.phases["optimizer step"].components["optimizer state"]
    assert 2 * share <= state <= 2 * share + 8 * len(sizes())
    whole = sum(
        4 * -(-shape[0] // count) * count * (size // shape[0]) for size, shape, _ in sizes()
    )
    weights = found.phases["forward"].components["weights"]
    outside = sum(4 * size for size, _, layer in sizes() if layer is None)
    assert share + outside < weights <= share + 3 * whole


def test_the_first_process_holds_what_it_gathers_to_save() -> None:
    found = traced(2, "fsdp").phases["checkpoint"]
    whole = sum(4 * size for size, _, _ in sizes())
    held = min(SHARD_BYTES, whole) + min(SHARD_BYTES, 2 * whole)
    assert held <= found.components["workspace"] <= held + 8 * max(s for s, _, _ in sizes())
    on_card = traced(2, "fsdp", "gpu").phases["checkpoint"]
    largest = max(4 * size for size, _, _ in sizes())
    assert on_card.components["workspace"] == largest


def test_copies_keep_their_gradients_from_the_first_step_on() -> None:
    whole = sum(4 * size for size, _, _ in sizes())
    alone, copied = traced(1, "none"), traced(2, "ddp")
    for phase in ("forward", "evaluation", "checkpoint"):
        more = copied.phases[phase].components["gradients"]
        assert more == whole, phase
        assert "gradients" not in alone.phases[phase].components
    summed = traced(2, "ddp", **{"optimize.accumulation_steps": 2})
    assert summed.phases["forward"].components["gradients"] == 2 * whole


def test_more_processes_hold_less_each_and_never_share_an_answer() -> None:
    found = [traced(count, "fsdp", "gpu") for count in (2, 4, 8)]
    peaks = [max(phase.total_bytes for phase in exact.phases.values()) for exact in found]
    assert peaks == sorted(peaks, reverse=True)
    assert len(set(peaks)) == len(peaks)


def test_a_trace_of_a_card_says_what_it_does_not_count() -> None:
    assert "connects the devices" in traced(2, "fsdp", "gpu").caveat
    assert "connects the devices" not in traced(2, "fsdp").caveat


@pytest.mark.parametrize(
    ("sharding", "settings"),
    [
        ("fsdp", {"optimize.gradient_checkpointing": "full", "optimize.precision": "bf16"}),
        ("fsdp", {"optimize.optimizer": "lion", "optimize.accumulation_steps": 2}),
        ("ddp", {"optimize.accumulation_steps": 2, "train.batch_size": 16}),
    ],
    ids=str,
)
def test_the_formula_is_what_a_trace_of_one_process_finds(
    sharding: str, settings: dict[str, object]
) -> None:
    changes = {"device.count": 2, "optimize.sharding": sharding, **SETTINGS, **settings}
    wanted = torch_sharded.Wanted(sharding, 2, changes)
    expected, found = torch_sharded.estimated(wanted), torch_sharded.traced(wanted)
    assert expected == {phase: pytest.approx(size, rel=0.02) for phase, size in found.items()}
