"""The formulas against what the engines really keep: a trace of torch's step, and XLA's plan of JAX's."""

from __future__ import annotations

import random
import statistics

import msgspec
import pytest

from memconsole.memory import jax_moments, torch_moments
from memconsole.memory.activations import torch_block
from memconsole.memory.moments import step_of
from memconsole.memory.sizes import sizes
from memconsole.plan.architecture import Architecture
from memconsole.plan.plan import Plan, replace

torch = pytest.importorskip("torch")

from memconsole_torch import checkpointing, precision  # noqa: E402
from memconsole_torch.decoder import Decoder  # noqa: E402
from tests.accuracy.random_plans import describe, draw  # noqa: E402
from tests.accuracy.torch_liveness import Liveness  # noqa: E402
from tests.accuracy.trace_torch import trace  # noqa: E402

SEEDS = range(10)
TRAINING = ("forward", "loss", "backward", "optimizer step")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def formula(plan: Plan, architecture: Architecture) -> dict[str, int]:
    step = step_of(plan, architecture, "cpu")
    module = jax_moments if plan.backend == "jax" else torch_moments
    peaks: dict[str, int] = {}
    for moment in module.moments(step):
        peaks[moment.phase] = max(peaks.get(moment.phase, 0), moment.total)
    return peaks


def test_the_formula_is_within_a_few_per_cent_of_the_traced_torch_step() -> None:
    errors = {}
    for seed in SEEDS:
        architecture, plan = draw(random.Random(seed), "torch")
        traced = trace(plan, architecture).peaks
        expected = formula(plan, architecture)
        truth = max(traced[phase] for phase in TRAINING)
        estimate = max(expected[phase] for phase in TRAINING)
        errors[describe(plan, architecture)] = estimate / truth - 1
    assert statistics.median(map(abs, errors.values())) <= 0.03, errors
    assert min(errors.values()) >= -0.08, errors
    assert max(errors.values()) <= 0.10, errors


def test_each_phase_of_a_torch_step_has_the_traced_peak() -> None:
    architecture, plan = draw(random.Random(4), "torch")
    plan = replace(plan, {"optimize.gradient_checkpointing": "none"})
    traced, expected = trace(plan, architecture).peaks, formula(plan, architecture)
    for phase in (*TRAINING, "checkpoint"):
        assert expected[phase] == pytest.approx(traced[phase], rel=0.05), phase


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
@pytest.mark.parametrize("width", ["fp32", "bf16"])
@pytest.mark.parametrize("seed", [0, 1, 2, 3, 4])
def test_a_torch_block_keeps_exactly_the_tensors_the_formula_lists(
    mode: str, width: str, seed: int
) -> None:
    """The difference of two depths is what one block keeps; no run of the optimizer is involved."""
    architecture, _ = draw(random.Random(seed), "torch")
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
    block = torch_block(architecture, width, mode, "cpu", 0)
    copies = 2 * sizes(architecture).block_matrices if width == "bf16" else 0
    expected = block.kept * rows * length + copies
    small = 16 * architecture.hidden_size + 16 * architecture.head_size + copies // 20
    assert abs(counted - expected) <= small


@pytest.mark.parametrize("seed", [3, 8])
def test_the_formula_is_near_what_xla_plans_for_the_jax_step(seed: int) -> None:
    pytest.importorskip("jax")
    from tests.accuracy.trace_jax import planned

    architecture, plan = draw(random.Random(seed), "jax")
    expected = formula(plan, architecture)
    estimate = max(expected[phase] for phase in TRAINING)
    xla = planned(plan, architecture)
    total = xla["argument"] + xla["output"] - xla["alias"] + xla["temporary"]
    assert estimate == pytest.approx(total, rel=0.25)
    step = step_of(plan, architecture, "cpu")
    arguments = step.weights + step.state.resident + step.data
    assert arguments == pytest.approx(xla["argument"], rel=0.01)


def test_accumulating_in_torch_adds_the_gradient_that_the_trace_shows() -> None:
    architecture, plan = draw(random.Random(0), "torch")
    once = replace(plan, {"optimize.accumulation_steps": 1, "optimize.fused_loss": False})
    more = replace(once, {"optimize.accumulation_steps": 3})
    traced = trace(more, architecture).peaks["loss"] - trace(once, architecture).peaks["loss"]
    added = formula(more, architecture)["loss"] - formula(once, architecture)["loss"]
    assert added == pytest.approx(traced, rel=0.1)
    assert added >= step_of(more, architecture, "cpu").gradients


@pytest.mark.parametrize(("seed", "mode"), [(0, "none"), (4, "selective"), (9, "full")])
def test_adapters_on_a_frozen_base_are_priced_as_they_are_traced(seed: int, mode: str) -> None:
    architecture, plan = draw(random.Random(seed), "torch")
    adapted = {
        "optimize.lora_rank": 16,
        "optimize.freeze_base": True,
        "optimize.gradient_checkpointing": mode,
    }
    plan = replace(plan, adapted)
    traced, expected = trace(plan, architecture).peaks, formula(plan, architecture)
    truth = max(traced[phase] for phase in TRAINING)
    assert max(expected[phase] for phase in TRAINING) == pytest.approx(truth, rel=0.03)
