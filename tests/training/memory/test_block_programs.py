"""The stored programs of torch's blocks: they are what a trace of the modules finds, and a block without one is priced."""

from __future__ import annotations

import random
from typing import Any
from unittest.mock import patch

import msgspec
import pytest

from memconsole.memory.activations import general
from memconsole.memory.activations.block_programs import is_traced, structure_programs
from memconsole.memory.activations.kernels import Kernels, Mask, Part, program_name, structure
from memconsole.memory.formula import memory_table
from memconsole.plan.machine.budget import Budget
from memconsole.plan.models.architecture import Architecture
from memconsole.plan.plan import Plan, replace

torch = pytest.importorskip("torch")

from memconsole_torch.models import decoder
from memconsole_torch.tracing import trace_step
from tests.accuracy.block_moments import packed, traced_program, unpacked
from tests.accuracy.block_programs import kernels, structures
from tests.accuracy.trace_block import AmbiguousSizeError, BlockTracer, term

SHOWN = 2
"""Programs of each structure that are traced anew here. `make accuracy` traces them all."""
LLAMA = "rmsnorm-rope-gated-grouped"


@pytest.fixture(scope="module")
def tracer() -> BlockTracer:
    torch.set_num_threads(1)
    return BlockTracer()


@pytest.mark.parametrize("name", sorted(structures()))
def test_stored_programs_are_those_of_the_modules_as_they_are(
    name: str, tracer: BlockTracer
) -> None:
    a, known = structures()[name], structure_programs(name)
    programs = kernels(a)
    assert known is not None
    assert known.programs.keys() == programs.keys()
    for chosen in random.Random(name).sample(sorted(programs), SHOWN):
        part, k = programs[chosen]
        found = traced_program(tracer, a, k, part)
        assert found == unpacked(known, chosen), (
            f"{chosen}: store it anew: python tests/accuracy/block_programs.py --write"
        )
        assert unpacked(packed({chosen: found}), chosen) == found


def test_a_layer_that_keeps_one_tensor_more_has_another_program(tracer: BlockTracer) -> None:
    k = Kernels(compute=4, kind="cpu", checkpointing="none")
    a, known = structures()[LLAMA], structure_programs(LLAMA)
    assert known is not None
    plain = decoder.MLP.activation
    with patch.object(
        decoder.MLP, "activation", lambda self, x: plain(self, x).sigmoid().sigmoid()
    ):
        found = traced_program(tracer, a, k, "block")
    assert found.kept != unpacked(known, program_name("block", k)).kept


@pytest.mark.parametrize(
    ("kind", "compute", "masks"),
    [
        ("cpu", 2, ("", "window", "documents")),
        ("gpu", 4, ("", "window", "documents")),
        ("gpu", 2, ("window", "documents")),
    ],
    ids=str,
)
@pytest.mark.parametrize("part", ["block", "evaluated block"])
def test_masks_with_one_program_have_the_same_bytes(
    kind: str, compute: int, masks: tuple[Mask, ...], part: Part, tracer: BlockTracer
) -> None:
    of = [Kernels(compute=compute, kind=kind, checkpointing="none", mask=mask) for mask in masks]
    assert len({program_name(part, k) for k in of}) == 1
    found = [traced_program(tracer, structures()[LLAMA], k, part) for k in of]
    assert all(one == found[0] for one in found)


def test_a_size_is_told_from_its_prime_factors() -> None:
    assert term(4 * 11 * 1613 * 64 * 1009) == (4, "B S h")
    assert term(2 * 11 * 1613 * 1616) == (2, "B S P")
    with pytest.raises(AmbiguousSizeError):
        term(11 * 1613 * 1009)  # a part of the hidden width


def odd(**changes: Any) -> Architecture:
    """A small decoder that no family has: rotary positions and a LayerNorm without biases."""
    a = Architecture(
        family="llama", vocab_size=300, hidden_size=256, layers=4, heads=4, kv_heads=2, head_size=64,
        intermediate_size=640, max_positions=512, norm="layernorm",
    )  # fmt: skip
    return msgspec.structs.replace(a, **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param(
            {"optimize.precision": "bf16", "optimize.gradient_checkpointing": "full"},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"optimize.gradient_checkpointing": "selective", "optimize.accumulation_steps": 2},
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
def test_a_block_without_a_program_is_priced_by_the_general_rule_and_says_so(
    changes: dict[str, Any],
) -> None:
    budget = Budget(
        name="card", kind="gpu", memory_label="VRAM", total_bytes=2**34, usable_bytes=2**34, why="test"
    )  # fmt: skip
    plan = replace(Plan(), {"train.batch_size": 16, "data.sequence_length": 128} | changes)
    assert not is_traced(odd())
    assert is_traced(odd(norm="rmsnorm"))
    table = memory_table(plan, odd(), budget)
    assert table.band_from == general.WHERE_FROM
    known = memory_table(plan, odd(norm="rmsnorm"), budget)
    assert known.band_from == ""
    low, high = (bytes_ / table.device_bytes for bytes_ in table.band_bytes)
    peaks = trace_step.trace(plan, odd(), "gpu").peaks
    assert low * table.peak_bytes < max(peaks.values()) < high * table.peak_bytes


def test_structures_have_distinct_names() -> None:
    changes: list[dict[str, Any]] = [
        {}, {"biases": True}, {"gated_mlp": False}, {"positions": "learned"}, {"query_key_norm": True},
        {"joint_query_key_norm": True}, {"pre_norms": False}, {"post_norms": True}, {"residual_multiplier": 0.5},
        {"parallel_residual": True},
        {"norm_unit_offset": True}, {"kv_heads": 4}, {"norm": "rmsnorm"},
    ]  # fmt: skip
    assert len({structure(odd(**change)) for change in changes}) == len(changes)
