"""Whole estimates: savings of every toggle, reasons, time, and how long making one takes."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memconsole.memory.estimate import estimate, model_of, table_of
from memconsole.memory.formula import PHASES
from memconsole.memory.seconds import forward_flops_per_token, peak_flops, step_flops, step_seconds
from memconsole.memory.state.sizes import sizes
from memconsole.memory.table import Saving
from memconsole.plan import plan as plans
from memconsole.plan.machine.budget import Budget
from memconsole.plan.plan import Plan
from memconsole.plan.toggles.optimizations import OPTIMIZATIONS, conflict

GIB = 2**30
LLAMA_8B = {"model.name": "llama-3.1-8b", "data.sequence_length": 2048, "train.batch_size": 1}


def device(kind: str = "gpu", gib: int = 24, bf16: float = 1e14) -> Budget:
    return Budget(
        name=kind,
        kind=kind,
        memory_label="VRAM",
        total_bytes=gib * GIB,
        usable_bytes=gib * GIB,
        why="test",
        bandwidth_bytes_per_second=1e12,
        peak_flops={"fp32": 2e13, "bf16": bf16, "fp16": bf16},
    )


def saving(plan: Plan, key: str, value: object, kind: str = "gpu") -> Saving:
    found = estimate(plan, device(kind)).savings
    return next(s for s in found if s.key == key and s.value == value)


def test_utilization_counts_the_models_own_operations_against_the_dense_peak() -> None:
    """Chowdhery et al. 2022, appendix B: 6 N + 12 L q T per token, the latter half of it under a causal mask."""
    plan = plans.replace(Plan(), {**LLAMA_8B, "optimize.precision": "bf16"})
    a = model_of(plan)
    used = a.vocab_size * a.hidden_size  # the untied head is a matmul, the embedding a lookup
    weights = sizes(a).total - used - (2 * a.layers + 1) * a.hidden_size
    operations = 6 * weights + 6 * a.layers * a.query_width * 2048
    rate = estimate(plan, device()).peak_tokens_per_second
    assert rate == pytest.approx(1e14 / operations)
    recomputing = plans.replace(plan, {"optimize.gradient_checkpointing": "full"})
    assert estimate(recomputing, device()).peak_tokens_per_second == rate
    fp32 = plans.replace(plan, {"optimize.precision": "fp32"})
    assert estimate(fp32, device()).peak_tokens_per_second == pytest.approx(rate / 5)


@pytest.mark.parametrize("backend", ["torch", "jax"])
@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_every_other_value_of_every_toggle_is_the_difference_of_two_whole_estimates(
    backend: str, kind: str
) -> None:
    plan = plans.replace(Plan(), {"backend": backend})
    budget = device(kind)
    whole = estimate(plan, budget)
    priced = {(s.key, s.value): s for s in whole.savings}
    for row in OPTIMIZATIONS:
        for value in row.values(plan):
            if value == row.value(plan):
                assert (row.key, value) not in priced
                continue
            found = priced[row.key, value]
            changed = row.apply(plan, value)
            if conflict(changed):
                assert not found.available
                assert found.reason
                continue
            after = table_of(changed, budget)
            assert found.saves_bytes == whole.table.device_bytes - after.device_bytes
            assert found.time_factor > 0
            assert found.available == (row.refusal(plan, value, kind) is None)
            if found.saves_bytes <= 0 or not found.available:
                assert found.reason
                assert "\n" not in found.reason


def test_a_toggle_whose_memory_is_gone_at_the_peak_says_which_phase_the_peak_is() -> None:
    huge = plans.replace(Plan(), {**LLAMA_8B, "data.sequence_length": 128})
    found = saving(huge, "optimize.gradient_checkpointing", "full")
    assert found.saves_bytes == 0
    assert table_of(huge, device()).peak_phase in PHASES
    assert found.reason.startswith("the peak is the ")


def test_reasons_name_the_device_or_the_backend_where_those_are_why() -> None:
    assert (
        "one device" in saving(Plan(), "optimize.sharding", "fsdp").reason
        or not saving(Plan(), "optimize.sharding", "fsdp").available
    )
    jax = plans.replace(Plan(), {"backend": "jax"})
    assert "XLA" in saving(jax, "optimize.precision", "bf16", "cpu").reason
    on_cpu, on_gpu = (saving(jax, "optimize.compile", True, kind) for kind in ("cpu", "gpu"))
    assert "in a loop, which takes less memory" in on_cpu.reason
    assert not on_cpu.available
    assert on_cpu.time_factor == 1
    assert on_gpu.available
    assert on_gpu.time_factor < 1


def test_a_value_that_needs_more_than_the_present_one_says_why_from_there() -> None:
    many = plans.replace(Plan(), {"optimize.accumulation_steps": 16})
    larger = "with fewer micro-batches per step each of them is larger"
    assert saving(many, "optimize.accumulation_steps", 1).reason == larger
    stored = plans.replace(Plan(), {"optimize.precision": "bf16-sr", **LLAMA_8B})
    assert "fp32 computes" in saving(stored, "optimize.precision", "fp32").reason
    assert "kept in fp32" in saving(stored, "optimize.precision", "bf16").reason
    short = {"data.sequence_length": 16, "optimize.optimizer_in_backward": True}
    few = plans.replace(Plan(), {**LLAMA_8B, **short, "train.grad_clip": 0.0})
    copied = saving(few, "optimize.precision", "bf16")
    assert copied.saves_bytes < 0
    assert "16-bit copies of the weights outweigh" in copied.reason


@given(
    st.sampled_from(("torch", "jax")),
    st.sampled_from(("cpu", "gpu", "tpu", "apple")),
    st.sampled_from(("fp32", "bf16")),
    st.integers(1, 64),
)
def test_time_is_positive_and_recomputing_takes_more_of_it(
    backend: str, kind: str, precision: str, rows: int
) -> None:
    plan = plans.replace(
        Plan(), {"backend": backend, "train.batch_size": rows, "optimize.precision": precision}
    )
    a, budget = model_of(plan), device(kind)
    times = [
        step_seconds(plans.replace(plan, {"optimize.gradient_checkpointing": m}), a, budget)
        for m in ("none", "selective", "attention", "full")
    ]
    assert 0 < times[0] < times[1] < times[2] <= times[3] < 2 * times[0]


def test_offloaded_activations_of_an_apple_gpu_take_the_disks_time() -> None:
    """Its memory is the host's: nothing is gained by moving them within it."""
    plain = plans.replace(Plan(), {"backend": "torch", "device.name": "cpu"})
    moving = plans.replace(plain, {"optimize.activation_offload": True})
    a = model_of(plain)
    more = {
        kind: step_seconds(moving, a, device(kind)) - step_seconds(plain, a, device(kind))
        for kind in ("cpu", "apple", "gpu")
    }
    assert more["apple"] >= more["cpu"], "its attention keeps scores, too"
    assert more["apple"] > 5 * more["gpu"] > 0


def test_operations_of_a_dense_model_are_six_per_weight_and_token_and_attention() -> None:
    plan = plans.replace(Plan(), LLAMA_8B)
    a = model_of(plan)
    weights = sizes(a).total - a.vocab_size * a.hidden_size  # embeddings are looked up
    per_token = step_flops(plan, a) / plan.tokens_per_step
    attention = 3 * 2 * 2048 * a.query_width * a.layers
    assert per_token == pytest.approx(6 * weights + attention, rel=0.001)
    assert forward_flops_per_token(a, 4096) > forward_flops_per_token(a, 2048)


def test_sixteen_bits_run_at_the_devices_own_rate_and_slower_on_a_cpu_without_them() -> None:
    assert peak_flops(device(), "bf16") == 1e14
    bare = Budget(
        name="cpu", kind="cpu", memory_label="host RAM", total_bytes=1, usable_bytes=1, why=""
    )
    assert peak_flops(bare, "fp32") > 1e9


def test_an_epochs_minutes_follow_from_tokens_and_rate_and_are_absent_when_the_size_is_unknown() -> (
    None
):
    known = estimate(Plan(), device())
    assert known.epoch_minutes is not None
    assert known.tokens_per_second == pytest.approx(Plan().tokens_per_step / known.step_seconds)
    overlapping = plans.replace(Plan(), {"data.stride": 64})
    assert estimate(overlapping, device()).epoch_minutes == pytest.approx(
        2 * known.epoch_minutes, rel=0.01
    )
    unknown = plans.replace(Plan(), {"data.source": "hf://nobody/of-unknown-size"})
    assert estimate(unknown, device()).epoch_minutes is None


def test_parameters_and_trained_ones() -> None:
    plan = plans.replace(Plan(), LLAMA_8B)
    whole = estimate(plan, device())
    assert whole.parameters == whole.trainable_parameters == 8_030_261_248
    adapted = plans.replace(plan, {"optimize.lora_rank": 8, "optimize.freeze_base": True})
    found = estimate(adapted, device())
    assert found.trainable_parameters == 20_971_520  # the count PEFT prints for all linear layers
    assert found.parameters == whole.parameters + found.trainable_parameters


@pytest.mark.parametrize("model", [{}, LLAMA_8B])
def test_a_key_press_is_priced_in_an_instant(model: dict[str, object]) -> None:
    plan = plans.replace(Plan(), model)
    estimate(plan, device())  # the first one counts the model's weights
    started = time.process_time()
    for _ in range(5):
        estimate(plan, device())
    assert (time.process_time() - started) / 5 < 0.1


def test_pricing_imports_no_framework() -> None:
    code = (
        "import sys\n"
        "from memconsole.memory import estimate\n"
        "from memconsole.memory.answers import advice\n"
        "bad = {'torch', 'jax', 'flax', 'numpy', 'textual'} & set(sys.modules)\n"
        "assert not bad, bad\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
