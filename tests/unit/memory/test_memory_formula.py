"""The memory table's properties over random plans and architectures."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memconsole.devices.budget import budget as budget_of
from memconsole.memory.activations import jax_chunks, jax_packing, jax_step
from memconsole.memory.coefficients import runtime
from memconsole.memory.estimate import model_of, table_of
from memconsole.memory.formula import PHASES, memory_table
from memconsole.memory.state.data import AHEAD_BYTES
from memconsole.memory.state.sizes import sizes
from memconsole.memory.state.step_sizes import step_of
from memconsole.memory.table import COMPONENTS, MemoryTable
from memconsole.plan import plan as plans
from memconsole.plan.machine.budget import Budget
from memconsole.plan.models.architecture import Architecture, parameters
from memconsole.plan.plan import Plan
from memconsole_trainer.data import stream
from tests.unit.memory.cards import card

GIB = 2**30


def budget(kind: str = "gpu", usable: int = 24 * GIB) -> Budget:
    return card(usable, kind)


@st.composite
def architectures(draw: st.DrawFn) -> Architecture:
    family: Any = draw(st.sampled_from(("gpt2", "llama", "gemma", "gemma3")))
    heads = draw(st.sampled_from((2, 4, 8)))
    head_size = draw(st.sampled_from((16, 32, 64)))
    kv_heads = heads if family == "gpt2" else draw(st.sampled_from((1, 2, heads)))
    hidden = heads * head_size
    common: dict[str, Any] = {
        "vocab_size": draw(st.integers(300, 20_000)),
        "hidden_size": hidden,
        "layers": draw(st.integers(1, 8)),
        "heads": heads,
        "kv_heads": kv_heads,
        "head_size": head_size,
        "intermediate_size": hidden * draw(st.integers(2, 4)),
        "max_positions": 2048,
    }
    if family == "gpt2":
        return Architecture(
            family="gpt2", norm="layernorm", activation="gelu_tanh", gated_mlp=False, biases=True,
            positions="learned", **common,
        )  # fmt: skip
    if family == "llama":
        return Architecture(
            family="llama",
            tied_embeddings=draw(st.booleans()),
            query_key_norm=draw(st.booleans()),
            **common,
        )
    special = family == "gemma3"
    return Architecture(
        family=family, norm_unit_offset=True, activation="gelu_tanh", scale_embeddings=True,
        query_key_norm=special, post_norms=special, sliding_window=64 if special else None,
        global_every=6 if special else 1, **common,
    )  # fmt: skip


@st.composite
def choices(draw: st.DrawFn) -> Plan:
    rank = draw(st.sampled_from((0, 0, 0, 8)))
    sharding = draw(st.sampled_from(("none", "fsdp")))
    return plans.replace(
        Plan(),
        {
            "backend": draw(st.sampled_from(("torch", "jax"))),
            "data.sequence_length": draw(st.sampled_from((16, 64, 128, 512))),
            "train.batch_size": draw(st.integers(1, 64)),
            "device.count": draw(st.sampled_from((1, 2, 8))) if sharding == "fsdp" else 1,
            "optimize.precision": draw(st.sampled_from(("fp32", "bf16", "fp16"))),
            "optimize.gradient_checkpointing": draw(
                st.sampled_from(("none", "selective", "attention", "full"))
            ),
            "optimize.accumulation_steps": draw(st.sampled_from((1, 4))),
            "optimize.optimizer": draw(
                st.sampled_from(("adamw", "adamw-8bit", "adamw8-all", "adafactor", "lion", "sgd"))
            ),
            "optimize.optimizer_offload": draw(st.sampled_from(("none", "cpu", "pinned"))),
            "optimize.activation_offload": draw(st.booleans()),
            "optimize.fused_loss": draw(st.booleans()),
            "optimize.lora_rank": rank,
            "optimize.freeze_base": rank > 0,
            "optimize.compile": draw(st.booleans()),
            "optimize.sharding": sharding,
        },
    )


KINDS = st.sampled_from(("cpu", "gpu", "rocm", "apple", "tpu"))


def component(table: MemoryTable, name: str) -> dict[str, int]:
    return next(c.phases for c in table.components if c.name == name)


def most(table: MemoryTable, name: str) -> int:
    return max(component(table, name).values(), default=0)


def plan_with(**settings: object) -> Plan:
    return plans.replace(Plan(), {k.replace("__", "."): v for k, v in settings.items()})


LLAMA = Architecture(
    family="llama", vocab_size=32_000, hidden_size=1024, layers=8, heads=16, kv_heads=4,
    head_size=64, intermediate_size=2816, max_positions=4096,
)  # fmt: skip


@given(choices(), architectures(), KINDS)
def test_the_peak_is_the_largest_phase_and_each_phase_is_the_sum_of_its_components(
    plan: Plan, architecture: Architecture, kind: str
) -> None:
    table = memory_table(plan, architecture, budget(kind))
    assert [c.name for c in table.components] == list(COMPONENTS)
    assert list(table.phases) == list(PHASES)
    for phase, total in table.phases.items():
        assert total == sum(c.at(phase) for c in table.components)
    assert table.peak_bytes == max(table.phases.values()) == table.phases[table.peak_phase]
    assert all(size >= 0 for c in table.components for size in c.phases.values())
    assert table.band_bytes[0] <= table.device_bytes <= table.band_bytes[1]
    assert table.peak_bytes <= table.reserved_bytes <= table.device_bytes
    if kind == "cpu":
        assert table.peak_bytes == table.device_bytes < table.host_bytes


@given(
    choices(), architectures(), KINDS, st.sampled_from(("train.batch_size", "data.sequence_length"))
)
def test_more_tokens_never_take_less_memory(
    plan: Plan, architecture: Architecture, kind: str, key: str
) -> None:
    larger = plans.replace(plan, {key: 2 * plans.get(plan, key)})
    small, large = (memory_table(p, architecture, budget(kind)) for p in (plan, larger))
    assert large.device_bytes >= small.device_bytes
    assert all(large.phases[phase] >= small.phases[phase] for phase in PHASES)


@given(choices(), architectures())
def test_checkpointing_never_raises_the_activations_kept_by_the_forward_pass(
    plan: Plan, architecture: Architecture
) -> None:
    plan = plans.replace(plan, {"optimize.activation_offload": False})  # nothing is kept then
    kept = [
        component(memory_table(p, architecture, budget()), "activations").get("forward", 0)
        for mode in ("none", "selective", "attention", "full")
        for p in [plans.replace(plan, {"optimize.gradient_checkpointing": mode})]
    ]
    assert kept[3] <= kept[2] <= min(kept[0], kept[1])
    if (
        not plan.optimize.lora_rank
    ):  # selective keeps the outputs of base and adapter, not their sum
        assert kept[1] <= kept[0]


@given(choices(), architectures())
def test_splitting_over_more_devices_never_takes_more_of_each(
    plan: Plan, architecture: Architecture
) -> None:
    one, two, eight = (
        memory_table(
            plans.replace(plan, {"device.count": n, "optimize.sharding": "fsdp"}),
            architecture,
            budget(),
        )
        for n in (1, 2, 8)
    )
    assert most(two, "optimizer state") >= most(eight, "optimizer state")
    assert most(one, "optimizer state") >= most(two, "optimizer state")
    assert two.peak_bytes >= eight.peak_bytes


@given(architectures())
def test_weights_gradients_and_state_are_counted_from_the_list_of_parameters(
    architecture: Architecture,
) -> None:
    listed = list(parameters(architecture))
    used = sum(p.size for p in listed if p.used)
    table = memory_table(Plan(), architecture, budget())
    assert component(table, "weights")["optimizer step"] == 4 * sizes(architecture).total
    assert component(table, "gradients")["optimizer step"] == 4 * used
    assert component(table, "optimizer state")["optimizer step"] == 8 * used


def test_weights_the_loss_never_reaches_have_neither_gradient_nor_state() -> None:
    plain = memory_table(Plan(), LLAMA, budget())
    extra = msgspec.structs.replace(LLAMA, auxiliary_rows=1000, diagnostic_classes=10)
    with_auxiliary = memory_table(Plan(), extra, budget())
    added = 1000 * 1024 + 10 * 1024 + 10
    assert sizes(extra).unused == added
    for name, bytes_each in (("weights", 4), ("gradients", 0), ("optimizer state", 0)):
        before = component(plain, name)["optimizer step"]
        assert component(with_auxiliary, name)["optimizer step"] == before + bytes_each * added


@given(architectures(), st.booleans())
def test_eight_bit_state_is_two_bytes_and_a_scale_on_large_matrices_only(
    architecture: Architecture, everywhere: bool
) -> None:
    roles = ["matrix", *(("embedding", "position", "head") if everywhere else ())]
    optimizer = "adamw8-all" if everywhere else "adamw-8bit"
    quantized = [
        p.size for p in parameters(architecture) if p.used and p.role in roles and p.size >= 4096
    ]
    full = sum(p.size for p in parameters(architecture) if p.used) - sum(quantized)
    expected = 8 * full + sum(2 * n + 2 * 4 * math.ceil(n / 256) for n in quantized)
    table = memory_table(plan_with(optimize__optimizer=optimizer), architecture, budget())
    state = component(table, "optimizer state")["optimizer step"]
    assert state == pytest.approx(expected, rel=1e-3)


def test_accumulating_at_the_same_micro_batch_keeps_one_more_gradient_through_the_forward_pass() -> (
    None
):
    once = memory_table(Plan(), LLAMA, budget())
    four = memory_table(plan_with(optimize__accumulation_steps=4), LLAMA, budget())
    gradient = 4 * sizes(LLAMA).total
    assert component(once, "gradients").get("loss", 0) == 0
    assert component(four, "gradients")["loss"] == gradient
    assert four.peak_bytes > once.peak_bytes


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("kind", "each"), [("gpu", (4, 2)), ("apple", (4, 6))])
def test_whole_logits_are_cast_to_fp32_except_on_a_gpu_and_chunked_ones_are_few(
    precision: str, kind: str, each: tuple[int, int]
) -> None:
    whole = plan_with(
        optimize__precision=precision, data__sequence_length=2048, train__batch_size=8
    )
    chunked = plans.replace(whole, {"optimize.fused_loss": True})
    pairs = whole.micro_batch_tokens * LLAMA.vocab_size
    logits = most(memory_table(whole, LLAMA, budget(kind=kind)), "logits and loss")
    bytes_each = each[precision != "fp32"]
    assert bytes_each * pairs <= logits <= (bytes_each + 0.1) * pairs
    assert most(memory_table(chunked, LLAMA, budget(kind=kind)), "logits and loss") < pairs


def test_adapters_on_a_frozen_base_have_the_only_gradients() -> None:
    rank = 8
    widths = sum(p.shape[0] + p.shape[1] for p in parameters(LLAMA) if p.role == "matrix")
    plan = plan_with(optimize__lora_rank=rank, optimize__freeze_base=True)
    table = memory_table(plan, LLAMA, budget())
    assert component(table, "gradients")["optimizer step"] == 4 * rank * widths
    assert component(table, "optimizer state")["optimizer step"] == 8 * rank * widths


def test_jax_is_judged_with_the_same_table_as_torch() -> None:
    torch, jax = (
        memory_table(plan_with(backend=name), LLAMA, budget()) for name in ("torch", "jax")
    )
    for name in ("weights", "optimizer state"):
        assert component(torch, name)["checkpoint"] == component(jax, name)["checkpoint"]


def test_a_larger_shuffle_buffer_is_host_memory_not_device_memory() -> None:
    source = {"data__source": "hf://nobody/of-unknown-size", "data__sequence_length": 1024}
    small = memory_table(plan_with(data__shuffle_buffer=1_000, **source), LLAMA, budget())
    large = memory_table(plan_with(data__shuffle_buffer=100_000, **source), LLAMA, budget())
    assert large.device_bytes == small.device_bytes
    rows = 99_000 * 1025 * 2  # two bytes a token
    ahead = AHEAD_BYTES - 1_000 * 1025 * 2
    assert rows < large.host_bytes - small.host_bytes - ahead < 1.15 * rows
    assert AHEAD_BYTES == stream.AHEAD_BYTES


@pytest.mark.parametrize(("device", "kind"), [("tpu-v5e", "tpu"), ("h100-80gb", "gpu")])
@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_offloaded_state_leaves_all_of_the_step(backend: str, device: str, kind: str) -> None:
    sizes = {"model.name": "gpt2-medium", "train.batch_size": 1}
    plan = plans.replace(Plan(), {"backend": backend, "device.name": device, **sizes})
    moved = plans.replace(plan, {"optimize.optimizer_offload": "pinned"})
    before, after = (step_of(p, model_of(p), kind) for p in (plan, moved))
    assert after.state.host == before.state.resident > 3 * after.state.at_step > 0
    if backend == "jax":
        peaks = [max(m.total for m in jax_step.moments(step)) for step in (before, after)]
        assert peaks[0] - peaks[1] >= after.state.host - after.state.at_step


def test_dropout_of_attention_in_jax_counts_one_chunk_of_scores() -> None:
    """cuDNN's attention, which has no scores, does not drop; a CPU's chunk has few of the rows."""
    drops = {"backend": "jax", "model.name": "gpt2", "optimize.precision": "bf16"}
    plan = plans.replace(Plan(), drops | {"train.attention_dropout": 0.1})
    a = model_of(plan)
    on_gpu = step_of(plan, a, "gpu")
    assert jax_chunks.score_bytes(on_gpu, 8) == 0
    assert jax_chunks.score_bytes(on_gpu, 8, dropping=True) > 0
    found = []
    for rate in (0.0, 0.1):
        changed = plans.replace(plan, {"train.attention_dropout": rate, "train.batch_size": 64})
        found.append(max(m.total for m in jax_step.moments(step_of(changed, a, "cpu"))))
    assert 0 <= found[1] - found[0] < 4 * 2**20


def test_a_tight_heap_of_jax_holds_one_packed_product_of_a_block() -> None:
    plan = plans.replace(Plan(), {"backend": "jax", "model.name": "gpt2"})
    a = model_of(plan)
    fast, tight, jemalloc = (
        jax_packing.library_bytes(step_of(plans.replace(plan, {"optimize.heap": h}), a, "cpu"))
        for h in ("fast", "tight", "jemalloc")
    )
    assert 0 < jax_packing.PACKED_PRODUCTS * tight < fast  # the head's product is the largest
    assert jemalloc == tight


def test_a_forward_pass_of_jax_packs_a_chunk_of_logits_and_no_gradients() -> None:
    plan = plans.replace(Plan(), {"backend": "jax", "model.name": "gpt2"})
    a, step = model_of(plan), step_of(plan, model_of(plan), "cpu")
    rows, chunk = 2, jax_chunks.CPU_CHUNK_TOKENS
    tokens = rows * plan.data.sequence_length
    assert tokens % chunk == 0
    h, f, deep = a.hidden_size, a.intermediate_size, jax_packing.PACKED_DEPTH
    assert h > deep
    products = (tokens + f), (tokens + h), (chunk + a.vocab_size)
    expected = jax_packing.PACKED_PRODUCTS * 4 * deep * max(products)
    assert (
        jax_packing.forward_library_bytes(step, rows) == expected < jax_packing.library_bytes(step)
    )


def test_logits_of_an_evaluation_count_where_less_than_one_copy_is_live() -> None:
    settings = {"backend": "jax", "model.name": "gpt2", "optimize.precision": "bf16"}
    plan = plans.replace(Plan(), settings | {"device.name": "tpu-v6e", "train.batch_size": 4})
    a = model_of(plan)
    larger = msgspec.structs.replace(a, vocab_size=4 * a.vocab_size)
    work = [
        next(
            m.workspace
            for m in jax_step.moments(step_of(plan, one, "tpu"))
            if m.phase == "evaluation"
        )
        for one in (a, larger)
    ]
    tokens = plan.evaluation_batch * plan.data.sequence_length
    assert work[1] - work[0] > 0.9 * 4 * 3 * a.vocab_size * tokens


def test_recent_nvidia_cards_have_larger_workspaces_of_cublas() -> None:
    """PyTorch, aten/src/ATen/cuda/CublasHandlePool.cpp: 32 MiB on Hopper and Blackwell, 8.125 MiB on other cards. The
    threads of the forward and the backward pass have one each."""
    expected = {"a100-80gb": 2 * 8.125, "h100-80gb": 64, "h200": 64, "b200": 64, "rtx-5090": 64}
    for name, mebibytes in expected.items():
        plan = plans.replace(Plan(), {"device.name": name, "backend": "torch"})
        table = table_of(plan, budget_of(plan, None))
        runtime = next(c for c in table.components if c.name == "runtime")
        assert runtime.at("backward") == mebibytes * 2**20, name


def test_the_band_covers_whole_logits_behind_the_memory_of_the_forward_pass() -> None:
    """With offloaded activations a forward pass leaves free memory in which the logits do not fit. PyTorch's allocator
    (`tests/accuracy/torch_reserved.py`) then maps 1.4 times the live peak."""
    plan = plans.replace(
        Plan(),
        {
            "model.name": "pythia-410m",
            "data.sequence_length": 2048,
            "train.batch_size": 6,
            "optimize.precision": "bf16",
            "optimize.activation_offload": True,
            "optimize.lora_rank": 1,
            "optimize.freeze_base": True,
        },
    )
    costs = runtime("torch", "gpu")
    assert costs.context_range is not None
    highest = []
    for chunked in (False, True):
        priced = plans.replace(plan, {"optimize.fused_loss": chunked})
        table = memory_table(priced, model_of(priced), budget("gpu"))
        highest.append((table.band_bytes[1] - costs.context_range[1]) / table.reserved_bytes)
    assert highest == [pytest.approx(1.4, abs=0.05), pytest.approx(costs.band[1], abs=0.001)]
