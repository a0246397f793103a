"""The formulas against what the engines really keep: a trace of torch's step, and XLA's plan of JAX's."""

from __future__ import annotations

import itertools
import random
from typing import Any

import msgspec
import pytest

from memconsole.memory.activations import jax_step
from memconsole.memory.activations.block_programs import block_program
from memconsole.memory.activations.kernels import Kernels
from memconsole.memory.state.step_sizes import step_of
from memconsole.plan.models.architecture import Architecture
from memconsole.plan.plan import Plan, replace

torch = pytest.importorskip("torch")

from memconsole_torch.models.decoder import Decoder
from memconsole_torch.techniques.activations import checkpointing
from memconsole_torch.techniques.weights import precision
from memconsole_torch.tracing.trace_liveness import Liveness
from tests.accuracy.random_plans import draw as draw_small
from tests.accuracy.torch_formula import TRAINING, estimated, traced
from tests.accuracy.wide_plans import TILED, Case, describe, draw
from tests.training.harness.grids import spread

LATER = pytest.mark.slow
"""More of the same, by `make soak`."""
SEEDS = range(2000, 2400)
SLOWEST = 3
"""Layers of the deepest model traced here: a trace takes most of a second per layer."""


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def sample(count: int, *, seeds: range = SEEDS, **wanted: Any) -> list[Case]:
    """The first `count` shallow cases of the grid whose optimize settings, or kind, are `wanted`."""
    found = []
    for seed in seeds:
        case = draw(seed)
        o = case.plan.optimize
        kind = wanted.get("kind", case.kind)
        rest = {key: value for key, value in wanted.items() if key != "kind"}
        if case.kind != kind or any(getattr(o, key) != value for key, value in rest.items()):
            continue
        if case.architecture.layers <= SLOWEST:
            found.append(case)
        if len(found) == count:
            return found
    raise AssertionError(f"the grid has too few of {wanted}")


@pytest.mark.parametrize("count", [1, pytest.param(2, marks=LATER)])
@pytest.mark.parametrize(
    "wanted",
    [
        {"gradient_checkpointing": "none", "precision": "bf16", "kind": "gpu"},
        {"gradient_checkpointing": "selective", "precision": "fp32", "kind": "cpu"},
        {"gradient_checkpointing": "full", "precision": "bf16", "kind": "cpu"},
        {"gradient_checkpointing": "none", "precision": "fp32", "kind": "gpu"},
        {"freeze_base": True, "kind": "gpu"},
        {"fused_loss": True, "optimizer": "adamw-8bit"},
        {"accumulation_steps": 5, "fused_loss": False},
        {"optimizer_in_backward": True, "gradient_checkpointing": "none"},
    ],
    ids=str,
)
def test_every_phase_of_the_formula_is_what_a_trace_of_the_engine_shows(
    wanted: dict[str, Any], count: int
) -> None:
    for case in sample(count, **wanted):
        expected, found = estimated(case), traced(case)
        for phase in TRAINING:
            assert expected[phase] == pytest.approx(found[phase], rel=0.03), (phase, describe(case))
        peak, truth = (max(peaks[phase] for phase in TRAINING) for peaks in (expected, found))
        assert peak == pytest.approx(truth, rel=0.01), describe(case)


@pytest.mark.parametrize("chunked", [False, True])
def test_a_step_of_dpo_holds_what_one_of_next_token_loss_does(chunked: bool) -> None:
    (case,) = sample(1, fused_loss=chunked, gradient_checkpointing="none")
    preferring = {"train.objective": "dpo", "train.batch_size": 4, "data.isolate_documents": False}
    case = msgspec.structs.replace(case, plan=replace(case.plan, preferring))
    expected, found = estimated(case), traced(case)
    for phase in (*TRAINING, "evaluation", "checkpoint"):
        assert expected[phase] == pytest.approx(found[phase], rel=0.01), (phase, describe(case))


@pytest.mark.parametrize("count", [1, pytest.param(2, marks=LATER)])
def test_what_comes_between_steps_is_priced_as_it_is_traced(count: int) -> None:
    for case in sample(count, precision="bf16"):
        expected, found = estimated(case), traced(case)
        for phase in ("evaluation", "checkpoint"):
            assert expected[phase] == pytest.approx(found[phase], rel=0.03), phase


MODES = itertools.product(("fp32", "bf16"), ("none", "selective", "attention", "full"))


@pytest.mark.parametrize(
    ("mode", "width", "seed"),
    [
        pytest.param(mode, width, seed, marks=() if seed == n % 5 else LATER)
        for n, (width, mode) in enumerate(MODES)
        for seed in range(5)
    ],
)
def test_a_torch_block_keeps_exactly_the_tensors_the_formula_lists(
    mode: str, width: str, seed: int
) -> None:
    """The difference of two depths is what one block keeps; no run of the optimizer is involved."""
    architecture, _ = draw_small(random.Random(seed), "torch")
    architecture = msgspec.structs.replace(architecture, sliding_window=None, global_every=1)
    rows, length = 2, 32
    live = []
    for layers in (1, 3):
        decoder = Decoder(msgspec.structs.replace(architecture, layers=layers))
        for weight in decoder.parameters():
            torch.nn.init.normal_(weight, std=0.02)
        checkpointing.apply(decoder, mode)  # type: ignore[arg-type]
        tracker = Liveness()
        tokens = torch.zeros(rows, length, dtype=torch.long)
        context = precision.forward_context(torch.device("cpu"), width)  # type: ignore[arg-type]
        with context, tracker:
            hidden = decoder(tokens)
            weights = sum(p.numel() * 4 for p in decoder.parameters())
            live.append(tracker.live - weights)
            del hidden
    counted = (live[1] - live[0]) / 2
    compute = 2 if width == "bf16" else 4
    block = block_program(architecture, Kernels(compute=compute, kind="cpu", checkpointing=mode))
    tokens_total = rows * length
    expected = block.kept.activations.bytes(tokens_total, tokens_total * length)
    expected += block.kept.copies + block.cast
    unit_offset = 4 * architecture.hidden_size * 4 if architecture.norm_unit_offset else 0
    assert abs(counted - expected) <= unit_offset + 8 * architecture.head_size


@pytest.mark.parametrize("seed", [3, pytest.param(8, marks=LATER)])
def test_the_formula_is_near_what_xla_plans_for_the_jax_step(seed: int) -> None:
    pytest.importorskip("jax")
    from memconsole_jax.tracing import trace_targets
    from tests.training.harness.planned_step import planned_step

    architecture, plan = draw_small(random.Random(seed), "jax")
    step = step_of(plan, architecture, "cpu")
    planned = planned_step(plan, architecture, trace_targets.target("", "cpu"))
    estimate = max(m.total for m in jax_step.moments(step) if m.phase in TRAINING)
    assert estimate == pytest.approx(planned.needed, rel=0.25)
    arguments = step.weights + step.state.resident + step.data
    assert arguments == pytest.approx(planned.arguments, rel=0.01)


@pytest.mark.parametrize(
    ("targets", "checkpointing"),
    [("query-value", "selective"), ("attention", "none"), ("all", "full")],
)
def test_adapters_of_jax_are_priced_by_the_matrices_that_have_them(
    targets: str, checkpointing: str
) -> None:
    pytest.importorskip("jax")
    from memconsole_jax.tracing import trace_targets
    from tests.training.harness.planned_step import planned_step

    changes = {
        "backend": "jax", "optimize.freeze_base": True, "optimize.lora_rank": 4,
        "optimize.lora_targets": targets, "optimize.gradient_checkpointing": checkpointing,
        "data.sequence_length": 256, "train.batch_size": 8, "optimize.heap": "tight",
    }  # fmt: skip
    case = with_settings(changes)
    architecture = msgspec.structs.replace(case.architecture, layers=4, vocab_size=300)
    step = step_of(case.plan, architecture, "cpu")
    planned = planned_step(case.plan, architecture, trace_targets.target("", "cpu"))
    estimate = max(m.total for m in jax_step.moments(step) if m.phase in TRAINING)
    assert estimate == pytest.approx(planned.needed, rel=0.1)


def with_settings(changes: dict[str, Any]) -> Case:
    """A small Llama with `changes` to the default plan."""
    architecture = Architecture(
        family="llama", vocab_size=2000, hidden_size=96, layers=2, heads=4, kv_heads=2, head_size=24,
        intermediate_size=264, max_positions=512, tied_embeddings=False,
    )  # fmt: skip
    sizes = {"data.sequence_length": 40, "train.batch_size": 3}
    return Case(architecture, replace(Plan(), sizes | changes), "cpu")


def test_accumulating_in_torch_adds_the_gradient_that_the_trace_shows() -> None:
    once = with_settings({"optimize.accumulation_steps": 1})
    more = with_settings({"optimize.accumulation_steps": 3})
    shown = traced(more)["loss"] - traced(once)["loss"]
    added = estimated(more)["loss"] - estimated(once)["loss"]
    assert added == pytest.approx(shown, rel=0.01)
    assert added >= step_of(more.plan, more.architecture, "cpu").gradients


@pytest.mark.parametrize(
    ("kind", "precision", "length", "heads", "checkpointing"),
    [
        ("cpu", "fp32", 200, 4, "none"),
        ("cpu", "bf16", 96, 4, "full"),
        ("gpu", "fp32", 96, 2, "selective"),
        ("gpu", "bf16", 312, 12, "none"),
    ],
)
def test_attention_with_dropout_is_priced_as_it_is_traced(
    kind: str, precision: str, length: int, heads: int, checkpointing: str
) -> None:
    changes = {
        "train.attention_dropout": 0.1, "optimize.precision": precision, "data.sequence_length": length,
        "optimize.gradient_checkpointing": checkpointing,
    }  # fmt: skip
    case = with_settings(changes)
    architecture = msgspec.structs.replace(case.architecture, heads=heads)
    case = Case(architecture, case.plan, kind)
    expected, found = estimated(case), traced(case)
    for phase in TRAINING:
        assert expected[phase] == pytest.approx(found[phase], rel=0.03), phase


@pytest.mark.parametrize(
    ("targets", "mode"),
    spread(
        ["attention", "query-value", "mlp"],
        [("gpu", "bf16", "selective"), ("gpu", "bf16", "full"), ("cpu", "fp32", "none")],
    ),
)
def test_matrices_without_adapters_keep_less(targets: str, mode: tuple[str, str, str]) -> None:
    kind, precision, checkpointing = mode
    changes = {
        "optimize.freeze_base": True, "optimize.lora_rank": 4, "optimize.lora_targets": targets,
        "optimize.precision": precision, "optimize.gradient_checkpointing": checkpointing,
        "data.sequence_length": 128, "train.batch_size": 4,
    }  # fmt: skip
    case = with_settings(changes)
    architecture = msgspec.structs.replace(case.architecture, layers=2, vocab_size=300)
    case = Case(architecture, case.plan, kind)
    expected, found = estimated(case), traced(case)
    for phase in ("loss", "backward", "evaluation"):
        assert expected[phase] == pytest.approx(found[phase], rel=0.03), phase


ADAPTERS = {"optimize.freeze_base": True, "optimize.lora_rank": 4}


@pytest.mark.parametrize(
    ("case", "kind"),
    spread(
        [
            ({"optimize.precision": "bf16"}, 0.01),
            ({"optimize.gradient_checkpointing": "selective"}, 0.01),
            (ADAPTERS, 0.01),
            (ADAPTERS | {"optimize.lora_targets": "mlp"}, 0.01),
            (ADAPTERS | {"optimize.lora_targets": "attention"}, 0.08),
        ],
        ["cpu", "gpu"],
    ),
    ids=str,
)
def test_a_parallel_block_is_priced_as_it_is_traced(
    case: tuple[dict[str, Any], float], kind: str
) -> None:
    changes, near = case
    architecture = Architecture(
        family="gpt_neox", vocab_size=1000, hidden_size=192, layers=3, heads=6, kv_heads=6, head_size=32,
        intermediate_size=768, max_positions=512, norm="layernorm", activation="gelu", gated_mlp=False,
        biases=True, rotary_size=8, parallel_residual=True, tied_embeddings=False,
    )  # fmt: skip
    sizes = {"data.sequence_length": 128, "train.batch_size": 4}
    whole = Case(architecture, replace(Plan(), sizes | changes), kind)
    expected, found = estimated(whole), traced(whole)
    assert expected["loss"] == pytest.approx(found["loss"], rel=0.01)
    assert expected["backward"] == pytest.approx(found["backward"], rel=near)
    assert expected["evaluation"] == pytest.approx(found["evaluation"], rel=0.02)


def test_chunks_of_the_loss_do_not_pile_up() -> None:
    """Chunk after chunk needs no more than the first, but for what the rows themselves take."""
    one, many = (
        with_settings(
            {"optimize.fused_loss": True, "data.sequence_length": 512, "train.batch_size": n}
        )
        for n in (2, 8)
    )
    logits = 4 * 1024 * one.architecture.vocab_size
    per_row = (traced(many)["forward"] - traced(one)["forward"]) / 6
    grown = traced(many)["loss"] - traced(one)["loss"]
    assert grown < 6 * per_row + logits / 2


@pytest.mark.parametrize("count", [1, pytest.param(2, marks=LATER)])
@pytest.mark.parametrize("checkpointing", ["none", "attention", "full"])
@pytest.mark.parametrize("rank", [0, 8])
def test_a_tiled_mlp_is_priced_as_it_is_traced(checkpointing: str, rank: int, count: int) -> None:
    cases = sample(
        count,
        seeds=range(TILED, TILED + 1000),
        gradient_checkpointing=checkpointing,
        lora_rank=rank,
        lora_targets="all",
    )
    for case in cases:
        expected, found = estimated(case), traced(case)
        for phase in (*TRAINING, "evaluation"):
            assert expected[phase] == pytest.approx(found[phase], rel=0.03), (phase, describe(case))


@pytest.mark.parametrize(
    ("targets", "checkpointing"),
    spread(["all", "attention", "query-value", "mlp"], ["none", "attention", "full"]),
)
def test_some_adapters_beside_tiles_are_priced_by_the_matrices_that_have_them(
    targets: str, checkpointing: str
) -> None:
    changes = ADAPTERS | {
        "optimize.tiled_mlp": True, "optimize.lora_targets": targets, "train.batch_size": 16,
        "optimize.gradient_checkpointing": checkpointing, "data.sequence_length": 128,
    }  # fmt: skip
    case = with_settings(changes)
    case = msgspec.structs.replace(
        case, architecture=msgspec.structs.replace(case.architecture, vocab_size=300)
    )
    expected, found = (max(of(case)[phase] for phase in TRAINING) for of in (estimated, traced))
    assert expected == pytest.approx(found, rel=0.03)


@pytest.mark.parametrize(
    ("checkpointing", "adapters"), [("none", {}), ("full", {}), ("attention", ADAPTERS)]
)
def test_a_tiled_mlp_of_jax_is_priced_as_xla_plans_it(
    checkpointing: str, adapters: dict[str, Any]
) -> None:
    pytest.importorskip("jax")
    from memconsole_jax.tracing import trace_targets
    from tests.training.harness.planned_step import planned_step

    peaks = []
    for tiled in (False, True):
        changes = adapters | {
            "backend": "jax", "optimize.tiled_mlp": tiled, "train.batch_size": 32,
            "optimize.gradient_checkpointing": checkpointing, "data.sequence_length": 128,
        }  # fmt: skip
        case = with_settings(changes)
        architecture = msgspec.structs.replace(
            case.architecture, vocab_size=300, intermediate_size=768
        )
        step = step_of(case.plan, architecture, "cpu")
        planned = planned_step(case.plan, architecture, trace_targets.target("", "cpu"))
        estimate = max(m.total for m in jax_step.moments(step) if m.phase in TRAINING)
        assert estimate == pytest.approx(planned.needed, rel=0.2)
        peaks.append(planned.needed)
    assert peaks[1] < 0.75 * peaks[0]
