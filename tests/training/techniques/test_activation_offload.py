"""What blocks keep for the backward pass moves off the device: the same training, less of it alive."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch

from memconsole.memory.activations.torch_step import moments
from memconsole.memory.state.step_sizes import step_of
from memconsole.plan.models.architecture import Architecture
from memconsole.plan.plan import PlanError
from memconsole_jax import engine as jax_engine
from memconsole_jax import target
from memconsole_jax.layout.stacking import stacks
from memconsole_jax.tasks.language import summed_nats
from memconsole_jax.techniques.activations import checkpointing
from memconsole_torch import engine as torch_engine
from memconsole_torch.techniques.activations import activation_offload
from memconsole_torch.tracing.trace_liveness import Liveness
from memconsole_trainer.weights.initialize import InitialWeights
from tests.accuracy.torch_formula import TRAINING, estimated, traced
from tests.accuracy.wide_plans import Case
from tests.training.harness import adapted, tiny_models
from tests.training.harness.activation_offload import EVERYTHING, FULL, KEY, STEPS
from tests.training.harness.adapted import LENGTH, MODELS, batch
from tests.training.harness.grids import spread
from tests.training.harness.offloaded import IN_BACKWARD, LORA, plan_with

torch.set_num_threads(1)


def stepped(backend: str, changes: dict[str, Any], directory: Path | None = None) -> Any:
    plan = plan_with(backend, changes)
    module: Any = torch_engine if backend == "torch" else jax_engine
    engine = module.create(plan, directory)
    engine.build(plan, MODELS["llama"], STEPS, adapted.Base("llama"))
    for step in range(STEPS):
        engine.train_step(batch(plan, step))
    return engine, [m.loss for m in engine.take_metrics()]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        FULL,
        {"optimize.precision": "bf16"},
        IN_BACKWARD,
        EVERYTHING,
        EVERYTHING | LORA,
        {"optimize.accumulation_steps": 2, "train.batch_size": 2} | LORA,
    ],
    ids=str,
)
def test_torch_trains_the_same_to_the_bit(changes: dict[str, Any], tmp_path: Path) -> None:
    plain, expected = stepped("torch", changes)
    engine, found = stepped("torch", changes | {KEY: True}, tmp_path)
    assert found == expected
    state = adapted.State(plain)
    for name, array in adapted.State(engine).tensors.items():
        np.testing.assert_array_equal(array, state.tensor(name), name)
    assert list(tmp_path.iterdir()) == [], "the file has no name"


@pytest.mark.parametrize("mode", ["none", "full"])
def test_torch_keeps_one_blocks_activations_alive(mode: str, tmp_path: Path) -> None:
    """Live bytes of real steps, with and without, next to the estimate."""
    a = Architecture(
        family="llama", vocab_size=96, hidden_size=64, layers=16, heads=4, kv_heads=4, head_size=16,
        intermediate_size=128, max_positions=64,
    )  # fmt: skip
    found, priced = [], []
    for value in (False, True):
        changes = {"optimize.gradient_checkpointing": mode, KEY: value, "train.batch_size": 128}
        plan = plan_with("torch", changes)
        engine = torch_engine.create(plan, tmp_path)
        engine.build(plan, a, STEPS, InitialWeights(a, 1))
        tracker = Liveness()
        with tracker:
            for _, tensor in engine.saved.named():
                tracker.count(tensor)
            tracker.phase, held = "step", tracker.live
            engine.train_step(tiny_models.batch(1, 128, LENGTH))
            found.append(tracker.peaks["step"] - held)
        step = step_of(plan, a, "cpu")
        most = max(m.total for m in moments(step) if m.phase in TRAINING)
        priced.append(most - step.weights - step.state.resident)
    assert found[0] / found[1] > (3 if mode == "none" else 1.15)
    np.testing.assert_allclose(found, priced, rtol=0.05)


@pytest.mark.parametrize(
    ("mode", "precision", "kind"), spread(["none", "full"], ["fp32", "bf16"], ["cpu", "gpu"])
)
def test_every_phase_is_priced_as_it_is_traced(mode: str, precision: str, kind: str) -> None:
    a = Architecture(
        family="llama", vocab_size=2000, hidden_size=256, layers=3, heads=4, kv_heads=2, head_size=64,
        intermediate_size=760, max_positions=512, tied_embeddings=False,
    )  # fmt: skip
    changes = {"optimize.gradient_checkpointing": mode, "optimize.precision": precision, KEY: True}
    case = Case(a, plan_with("torch", changes | {"optimize.fused_loss": True}), kind)
    expected, found = estimated(case), traced(case)
    for phase in TRAINING:
        assert expected[phase] == pytest.approx(found[phase], rel=0.03), phase


def test_the_file_is_as_large_as_one_micro_batch_and_goes_with_the_engine(tmp_path: Path) -> None:
    most = []
    write = activation_offload.Disk.write

    def counted(self: Any, tensor: torch.Tensor) -> Any:
        kept = write(self, tensor)
        most.append(os.fstat(self._file.fileno()).st_size)
        return kept

    activation_offload.Disk.write = counted  # type: ignore[method-assign]
    try:
        engine, _ = stepped("torch", FULL | {KEY: True}, tmp_path)
    finally:
        activation_offload.Disk.write = write  # type: ignore[method-assign]
    a = MODELS["llama"]
    assert max(most) == a.layers * 4 * LENGTH * a.hidden_size * 4
    assert engine is not None


class Elsewhere(torch.Tensor):
    """A tensor that numpy cannot see into, as another device's."""

    def numpy(self, **_: Any) -> Any:
        raise TypeError("can't convert a tensor of another device to numpy")

    def cpu(self, **_: Any) -> torch.Tensor:
        return self.as_subclass(torch.Tensor).clone()


def test_the_disk_gives_tensors_back_to_the_device_they_came_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a device that this machine need not have: the copies to it are made here."""
    moved: list[Any] = []

    def to(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        moved.append(device)
        return tensor.clone().as_subclass(Elsewhere)

    monkeypatch.setattr(torch.Tensor, "to", to)
    device = torch.device("mps")
    disk = activation_offload.store(device, tmp_path)
    tensors = [torch.arange(n, dtype=kind) for n, kind in ((7, torch.float32), (9, torch.bfloat16))]
    kept = [disk.write(tensor.as_subclass(Elsewhere)) for tensor in tensors]
    for tensor, where in zip(tensors, kept, strict=True):
        found = disk.read(where)
        assert isinstance(found, Elsewhere)
        assert found.dtype == tensor.dtype
        assert torch.equal(found.as_subclass(torch.Tensor), tensor)
    assert moved == [device, device]


def test_a_cpus_tensors_are_written_and_read_without_a_copy(tmp_path: Path) -> None:
    disk = activation_offload.store(torch.device("cpu"), tmp_path)
    tensor = torch.arange(1 << 20, dtype=torch.float32)
    counted = Liveness()
    counted.count(tensor)
    with counted:
        counted.phase, held = "moving", counted.live
        found = disk.read(disk.write(tensor))
    assert counted.peaks["moving"] - held == found.nbytes, "what is read, and nothing else"
    assert torch.equal(found, tensor)


def test_a_full_disk_is_an_error_of_the_step(tmp_path: Path) -> None:
    def full(*arguments: Any) -> int:
        raise OSError(28, "No space left on device")

    plan = plan_with("torch", FULL | {KEY: True})
    engine = torch_engine.create(plan, tmp_path)
    engine.build(plan, MODELS["llama"], STEPS, adapted.Base("llama"))
    before = os.pwrite
    os.pwrite = full  # type: ignore[assignment]
    try:
        with pytest.raises(OSError, match="No space left"):
            engine.train_step(batch(plan, 0))
    finally:
        os.pwrite = before


def test_jax_trains_the_same_with_inputs_in_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program that other devices get, on a CPU, whose pinned memory is the same: it saves nothing there."""
    _, expected = stepped("jax", FULL)
    around = checkpointing.around

    def as_elsewhere(mode: Any, *, unrolled: bool, offload: bool, disk: Any) -> Any:
        return checkpointing.offloaded if offload else around(mode)

    monkeypatch.setattr(checkpointing, "around", as_elsewhere)
    _, found = stepped("jax", FULL | {KEY: True})
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_in_jax_block_inputs_alone_are_kept_and_in_host_memory() -> None:
    """As a GPU's program: JAX leaves the moves out of one for a CPU."""
    plan, a = plan_with("jax", FULL | {KEY: True}), MODELS["llama"]
    trained = {n: jax.ShapeDtypeStruct(s.shape, np.float32) for n, s in stacks(a).items()}
    rows = jax.ShapeDtypeStruct((4, LENGTH), np.int32)
    with target.absent("gpu"):
        loss = summed_nats(plan, a, chunked=True)
        arrays = {"inputs": rows, "targets": rows}
        traced_step = jax.jit(jax.grad(loss)).trace(trained, {}, arrays)
        lowered = traced_step.lower(lowering_platforms=("cuda",)).as_text()
    kept = f"f32<host>[{a.layers},4,{LENGTH},{a.hidden_size}]"
    assert kept in str(traced_step.jaxpr)
    assert "f32[2,4," not in str(traced_step.jaxpr).replace(kept, ""), "nothing else of each layer"
    assert "pinned_host" in lowered


@pytest.mark.parametrize(
    ("backend", "changes", "reason"),
    [
        ("torch", {"optimize.gradient_checkpointing": "selective"}, "keeps its outputs itself"),
        ("torch", {"optimize.compile": True}, "inside their own graph"),
        ("jax", {}, "inputs of checkpointed blocks"),
    ],
)
def test_what_keeps_activations_out_of_reach_is_refused(
    backend: str, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(PlanError, match=reason):
        plan_with(backend, changes | {KEY: True})
