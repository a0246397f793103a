"""A frozen base in int8 and nf4 codes: one specification, the same codes in both backends, less memory."""

from __future__ import annotations

import json
import statistics
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from memconsole.memory.state.sizes import STORAGE_BLOCK
from memconsole.memory.state.step_sizes import step_of
from memconsole.plan.check import check
from memconsole.plan.models.architecture import Architecture, parameters
from memconsole.plan.plan import Plan, PlanError, replace
from memconsole_jax import target
from memconsole_jax.techniques.weights import quantized_base as jax_base
from memconsole_torch.techniques.weights import quantized_base as torch_base
from memconsole_trainer.techniques import adapters, base_storage
from memconsole_trainer.techniques.base_storage import BLOCK, SCALES, dequantize, quantize
from tests.accuracy.torch_formula import TRAINING, estimated, traced
from tests.accuracy.wide_plans import Case
from tests.training.harness import adapted, torch_comparison
from tests.training.harness.adapted import (
    LENGTH,
    MODELS,
    STEPS,
    Base,
    State,
    batch,
    built,
    plan_with,
)
from tests.training.harness.grids import spread

torch.set_num_threads(1)
VECTORS = json.loads(
    Path(__file__).parents[2].joinpath("data/base_storage_vectors.json").read_text()
)
STORAGES = ("int8", "nf4")
ERROR = {"int8": 0.007, "nf4": 0.1}
"""Root mean square of the rounding of normal weights, as a share of their own."""


def matrix(rows: int, columns: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, columns), dtype=np.float32) * 0.02


def vector() -> np.ndarray:
    """Values of every size: whole blocks, a ragged one, zeros, subnormal and huge numbers, and exact halves."""
    x = np.sin(np.arange(200, dtype=np.float64) * 0.7).astype(np.float32)
    x[:64] *= np.float32(1e-3)
    x[64:128] = 0
    x[64] = np.float32(1e-42)
    x[128:136] = np.array([127, -127, 0.5, 1.5, 2.5, -0.5, -1.5, 3.4e38 / 3.4e36], np.float32)
    return x


@pytest.mark.parametrize("storage", STORAGES)
def test_codes_and_values_are_those_of_the_vector_file(storage: Any) -> None:
    codes, scales = quantize(vector(), storage)
    expected = VECTORS[storage]
    assert codes.tobytes().hex() == expected["codes"]
    assert scales.tobytes().hex() == expected["scales"]
    values = dequantize(codes, scales, (200,), storage)
    assert values.tobytes().hex() == expected["values"]


@pytest.mark.parametrize("storage", STORAGES)
def test_both_backends_decode_the_vector_file_bit_by_bit(storage: Any) -> None:
    found = VECTORS[storage]
    codes = np.frombuffer(bytes.fromhex(found["codes"]), np.uint8).reshape(
        -1, base_storage.code_bytes(storage)
    )
    scales = np.frombuffer(bytes.fromhex(found["scales"]), np.float32)
    expected = np.frombuffer(bytes.fromhex(found["values"]), np.float32)
    tensors = torch.from_numpy(codes.copy()), torch.from_numpy(scales.copy())
    ours = torch_base.decoded(*tensors, (1, 200), torch.float32).numpy().reshape(-1)
    for shape in (
        (1, 200),
        (1, 192),
        (3, 64),
    ):  # blocks across rows, one row of blocks, and several
        blocks = -(-np.prod(shape) // BLOCK)
        held = jax_base.Layout.of(shape).arrange(codes[:blocks], scales[:blocks], storage)
        for kind in ("cpu", "tpu"):
            with target.absent(kind):
                theirs = np.asarray(jax_base.decoded(*held, shape))
            np.testing.assert_array_equal(theirs.reshape(-1), expected[: theirs.size])
    np.testing.assert_array_equal(ours, expected)
    narrow = torch_base.decoded(*tensors, (1, 200), torch.bfloat16)
    np.testing.assert_array_equal(
        narrow.float().numpy().reshape(-1), adapters.bf16_rounded(expected)
    )


def test_nf4_values_are_quantiles_of_the_normal_distribution() -> None:
    """QLoRA, appendix E: eight positive and seven negative ones, evenly spaced in probability, and zero."""
    edge = (1 - 1 / 32 + 1 - 1 / 30) / 2
    inverse = statistics.NormalDist().inv_cdf
    above = [inverse(p) for p in np.linspace(edge, 0.5, 9)[:-1]]
    below = [-inverse(p) for p in np.linspace(edge, 0.5, 8)[:-1]]
    expected = np.sort(np.array([*above, 0.0, *below])) / max(above)
    np.testing.assert_allclose(base_storage.NF4, expected, atol=2e-7)


@pytest.mark.parametrize("storage", STORAGES)
def test_every_code_is_the_nearest_value(storage: Any) -> None:
    x = matrix(37, 53)
    codes, scales = quantize(x, storage)
    found = dequantize(codes, scales, x.shape, storage)
    levels = np.arange(-127, 128) if storage == "int8" else np.array(base_storage.NF4)
    every = np.repeat(scales, BLOCK)[: x.size, None].astype(np.float64) * levels
    nearest = np.abs(every - x.reshape(-1, 1)).min(axis=1)
    np.testing.assert_allclose(np.abs(found - x).reshape(-1), nearest, atol=1e-8)
    error = np.sqrt(np.mean(np.square(found - x)) / np.mean(np.square(x)))
    assert error < ERROR[storage]


def quantized(backend: str, storage: str, changes: dict[str, Any] | None = None) -> Plan:
    plan: Plan = plan_with(backend, {"optimize.base_storage": storage, **(changes or {})})
    return plan


@cache
def trained(
    backend: str, storage: str, kind: str = "llama", composed: bool = False
) -> tuple[Any, list[float]]:
    plan = quantized(backend, storage, adapted.COMPOSED if composed else None)
    engine = built(plan, kind)
    for step in range(STEPS):
        engine.train_step(batch(plan, step))
    return engine, [m.loss for m in engine.take_metrics()]


@pytest.mark.parametrize(
    ("storage", "kind"), [("int8", "llama"), ("nf4", "llama"), ("nf4", "gpt2")]
)
def test_both_backends_take_the_same_twenty_steps(storage: str, kind: str) -> None:
    ours, theirs = trained("torch", storage, kind)[1], trained("jax", storage, kind)[1]
    assert ours[-1] < ours[0] - 0.1
    np.testing.assert_allclose(ours, theirs, rtol=1e-4)


@pytest.mark.parametrize("storage", STORAGES)
def test_it_trains_as_the_rounded_base_would_unquantized(storage: str) -> None:
    """The same base, rounded beforehand and stored whole: only the storage differs."""

    class Rounded(Base):  # type: ignore[misc,unused-ignore]
        def tensor(self, name: str) -> np.ndarray:
            found = {p.name: p for p in parameters(MODELS["llama"])}[name]
            return base_storage.stored(quantized("torch", storage), found, super().tensor(name))

    for backend in ("torch", "jax"):
        plan = plan_with(backend)
        engine = built(plan, weights=Rounded("llama"))
        for step in range(4):
            engine.train_step(batch(plan, step))
        losses = [m.loss for m in engine.take_metrics()]
        np.testing.assert_allclose(losses, trained(backend, storage)[1][:4], rtol=2e-6)


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_it_composes_with_everything_else(backend: str) -> None:
    np.testing.assert_allclose(
        trained(backend, "nf4", composed=True)[1], trained("torch", "nf4")[1], rtol=0.02
    )


def held_bytes(engine: Any, backend: str) -> int:
    if backend == "jax":
        return sum(
            x.nbytes for x in [*engine._frozen.values(), *engine._train_state.weights.values()]
        )
    return sum(p.nbytes for p in (*engine.module.parameters(), *engine.module.buffers()))


@pytest.mark.parametrize("backend", ["torch", "jax"])
@pytest.mark.parametrize("storage", STORAGES)
def test_the_engine_holds_the_bytes_that_are_estimated(storage: str, backend: str) -> None:
    engine, _ = trained(backend, storage)
    estimated = step_of(quantized(backend, storage), MODELS["llama"], "cpu").weights
    assert held_bytes(engine, backend) == estimated
    plain, _ = adapted.trained(backend)
    matrices = sum(p.size for p in parameters(MODELS["llama"]) if p.role == "matrix")
    saved = held_bytes(plain, backend) - estimated
    per_element = {"int8": 4 - 1 - 4 / 64, "nf4": 4 - 0.5 - 4 / 64}[storage]
    assert saved == pytest.approx(per_element * matrices, rel=0.01)
    assert engine.parameters == plain.parameters


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_codes_are_the_specifications_and_only_of_matrices(backend: str) -> None:
    engine, _ = trained(backend, "nf4")
    start = Base("llama")
    for p in parameters(MODELS["llama"]):
        if backend == "torch":
            own = {
                **dict(engine.module.named_parameters()),
                **dict(engine.module.named_buffers()),
            }
            found = {n: np.asarray(t.detach()) for n, t in own.items()}
            held, scales = found[p.name], found.get(p.name + SCALES)
        else:
            name = p.name if p.layer is None else p.name.replace(f"layers.{p.layer}.", "layers.", 1)
            arrays = {n: np.asarray(x) for n, x in engine._frozen.items()}
            at = () if p.layer is None else p.layer
            held = arrays[name][at]
            scales = arrays[name + SCALES][at] if name + SCALES in arrays else None
        if p.role == "matrix":
            codes, expected = quantize(start.tensor(p.name), "nf4")
            if backend == "jax":
                codes, expected = jax_base.Layout.of(p.shape).arrange(codes, expected, "nf4")
            np.testing.assert_array_equal(held, codes)
            np.testing.assert_array_equal(scales, expected)
        else:
            assert scales is None
            np.testing.assert_array_equal(held, start.tensor(p.name))


@pytest.mark.parametrize("backend", ["torch", "jax"])
@pytest.mark.parametrize("composed", [False, True], ids=["fp32", "bf16"])
def test_merged_weights_give_the_same_loss(backend: str, composed: bool) -> None:
    engine, _ = trained(backend, "nf4", composed=composed)
    plan = quantized(backend, "nf4", adapted.COMPOSED if composed else None)
    state = State(engine)
    merged = adapters.Merged(
        plan, MODELS["llama"], Base("llama"), lambda name: state.tensor(f"model.{name}")
    )
    rows = batch(plan, 0)
    inputs, targets = rows["inputs"].reshape(4, LENGTH), rows["targets"].reshape(4, LENGTH)
    scores = torch.from_numpy(torch_comparison.logits(MODELS["llama"], merged, inputs)).log_softmax(
        -1
    )
    labels = torch.from_numpy(targets).long()
    kept = labels != -100
    expected = -float(scores[kept].gather(1, labels[kept][:, None]).sum())
    assert engine.evaluate([rows]).loss == pytest.approx(expected, rel=3e-3 if composed else 1e-5)


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_a_checkpoint_holds_adapters_only_and_resumes_bit_for_bit(backend: str) -> None:
    plan = quantized(backend, "nf4")
    engine, _ = trained(backend, "nf4")
    before = State(engine)
    assert all(".lora_" in n for n in before.names() if n.startswith("model."))
    engine.train_step(batch(plan, 5))
    after = State(engine)
    other = built(plan)
    other.load_state(before)
    other.train_step(batch(plan, 5))
    for name, array in State(other).tensors.items():
        np.testing.assert_array_equal(array, after.tensor(name), name)
    engine.load_state(before)


@pytest.mark.parametrize("mode", ["none", "full"])
def test_jax_never_holds_the_whole_base_decoded(mode: str) -> None:
    """XLA's own plan: deeper models need codes and activations, not matrices, for each layer more."""
    import jax
    import msgspec

    from memconsole_jax.compiled.programs import Programs

    device = jax.devices("cpu")[0]
    wide: Architecture = msgspec.structs.replace(
        MODELS["llama"], hidden_size=128, heads=4, kv_heads=4, head_size=32, intermediate_size=256
    )
    temporaries = []
    for layers in (2, 6):
        a = msgspec.structs.replace(wide, layers=layers)
        plan = quantized(
            "jax", "nf4", {"optimize.gradient_checkpointing": mode, "train.batch_size": 1}
        )
        compiled = Programs.of(plan, a, "cpu", device).lower_train().compile()
        temporaries.append(compiled.memory_analysis().temp_size_in_bytes)
    matrices = 4 * sum(p.size for p in parameters(wide) if p.role == "matrix" and p.layer == 0)
    per_layer = (temporaries[1] - temporaries[0]) / 4
    assert per_layer < 0.5 * matrices, (per_layer, matrices)


@pytest.mark.parametrize(
    ("storage", "precision", "kind"), spread(STORAGES, ["fp32", "bf16"], ["cpu", "gpu"])
)
def test_every_phase_is_priced_as_it_is_traced(storage: str, precision: str, kind: str) -> None:
    a = Architecture(
        family="llama", vocab_size=2000, hidden_size=256, layers=2, heads=4, kv_heads=2, head_size=64,
        intermediate_size=760, max_positions=512, tied_embeddings=False,
    )  # fmt: skip
    mode = "full" if storage == "nf4" else "none"
    changes = {
        "optimize.precision": precision,
        "optimize.gradient_checkpointing": mode,
        "optimize.fused_loss": True,
        "train.batch_size": 3,
    }
    case = Case(a, quantized("torch", storage, changes), kind)
    expected, found = estimated(case), traced(case)
    for phase in TRAINING:
        assert expected[phase] == pytest.approx(found[phase], rel=0.01), phase


def test_a_base_that_is_not_frozen_is_not_stored_in_codes() -> None:
    with pytest.raises(PlanError, match="only a frozen base"):
        check(replace(Plan(), {"optimize.base_storage": "nf4"}))


def test_the_block_size_is_priced() -> None:
    assert STORAGE_BLOCK == BLOCK
