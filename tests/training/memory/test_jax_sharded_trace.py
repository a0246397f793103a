"""What XLA plans for one of several JAX devices: its share, and nothing large that every device holds whole."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from itertools import islice
from typing import Any

import msgspec
import pytest

pytest.importorskip("jax")

from memconsole.memory.exact.timeline import TracerQuestion
from memconsole.memory.state.step_sizes import step_of
from memconsole.plan import catalog
from memconsole.plan.models.model import Model
from memconsole.plan.models.recommender import Recommender
from memconsole.plan.plan import Plan, replace
from memconsole.plan.plan_file import dumps
from memconsole.runs.act.environment import trainer_environment
from memconsole_jax.layout.stacking import stacks
from memconsole_jax.tracing import trace, trace_targets
from memconsole_jax.tracing.trace import Needed
from tests.accuracy import xla
from tests.training.harness import tiny_models
from tests.training.harness.planned_step import planned_step

COUNT, ROWS, LENGTH = 4, 2, 128
WIDE = msgspec.structs.replace(
    tiny_models.ARCHITECTURES["llama-untied"], vocab_size=4096, layers=16, max_positions=LENGTH
)
"""Logits are its largest tensor."""
DEEP = msgspec.structs.replace(WIDE, vocab_size=96, layers=64)
"""Its weights are those of its blocks."""
SIZES = {"train.batch_size": ROWS, "data.sequence_length": LENGTH}
WEIGHTS = {name: stack.shape for name, stack in stacks(WIDE).items()}
BYTES = sum(4 * p.size for p in WIDE.parameters())
CHUNKED = {"optimize.fused_loss": True}


def planned(sharding: str, model: Model = WIDE, **settings: Any) -> Needed:
    changes = {key.replace("__", "."): value for key, value in settings.items()}
    return _planned(sharding, model, tuple(changes.items()))


@cache
def _planned(sharding: str, model: Model, settings: tuple[tuple[str, Any], ...]) -> Needed:
    """The step of one device, alone or of `COUNT`."""
    plan = plan_of(sharding, dict(settings))
    place = trace_targets.target("", "cpu", plan.device.count)
    return planned_step(plan, model, place)


def plan_of(sharding: str, settings: dict[str, Any]) -> Plan:
    count = 1 if sharding == "none" else COUNT
    changes = {"backend": "jax", "device.name": "cpu", "device.count": count, **SIZES}
    return replace(Plan(), changes | {"optimize.sharding": sharding} | settings)


@pytest.mark.parametrize(
    "settings",
    [{}, {"optimize__fused_loss": True}, {"optimize__gradient_checkpointing": "full"}],
    ids=["plain", "chunked", "full"],
)
def test_one_of_several_copies_needs_what_one_device_alone_needs(settings: dict[str, Any]) -> None:
    """Neither logits nor hidden states nor gathered weights of other devices are there. The logits of all rows would
    be three times those of a device more."""
    alone, copied = planned("none", **settings), planned("ddp", **settings)
    assert copied.needed == pytest.approx(alone.needed, rel=0.03)
    assert 4 * WIDE.vocab_size * ROWS * LENGTH > 0.1 * alone.needed


def test_a_recommenders_loss_goes_through_the_rows_of_its_own_device() -> None:
    """In one device's chunks, as if it were alone; the rows of all devices would take 2.6 % more."""
    model = Recommender(
        decoder=msgspec.structs.replace(tiny_models.ARCHITECTURES["gemma"], layers=2),
        items=4096,
        clusters=8,
        embedding_size=8,
        adapter_size=12,
    )
    rows, length = 16, 64
    assert rows * length > model.chunk_positions
    sizes = {"train.batch_size": rows, "data.sequence_length": length}
    alone, copied = planned("none", model, **sizes), planned("ddp", model, **sizes)
    assert copied.needed == pytest.approx(alone.needed, rel=0.01)


def test_weights_gathered_for_a_block_are_not_kept_for_the_backward_pass() -> None:
    few = {"train.batch_size": 1, "data.sequence_length": 32}
    alone, split = planned("none", DEEP, **few), planned("fsdp", DEEP, **few)
    blocks = sum(4 * p.size for p in DEEP.parameters() if p.layer is not None)
    more = split.needed - split.arguments - (alone.needed - alone.arguments)
    assert more < 0.2 * blocks


@pytest.mark.parametrize("sharding", ["ddp", "fsdp"])
def test_the_formula_of_one_of_several_devices_is_near_its_plan(sharding: str) -> None:
    step = step_of(plan_of(sharding, {}), WIDE, "cpu")
    assert xla.peak(step) == pytest.approx(planned(sharding).needed, rel=0.1)


@pytest.mark.parametrize("tied", [False, True])
def test_what_all_micro_batches_gather_once_is_priced_while_blocks_run_backwards(
    tied: bool,
) -> None:
    model = msgspec.structs.replace(
        WIDE, layers=2, hidden_size=256, intermediate_size=1024, tied_embeddings=tied
    )
    several = {"optimize.accumulation_steps": 2, "optimize.gradient_checkpointing": "full"}
    found = planned("fsdp", model, **several, **CHUNKED).needed
    estimated = xla.peak(step_of(plan_of("fsdp", several | CHUNKED), model, "cpu"))
    assert estimated == pytest.approx(found, rel=0.06)


def test_a_device_holds_its_share_of_weights_and_state() -> None:
    split = planned("fsdp")
    share = sum(4 * _share(name, shape) for name, shape in WEIGHTS.items())
    batch = 3 * 4 * ROWS * LENGTH
    assert split.arguments == pytest.approx(3 * share, abs=batch + 64)
    assert share < 1.05 * BYTES / COUNT


def _share(name: str, shape: tuple[int, ...]) -> int:
    """Elements that a device has of a weight: one of `COUNT` equal parts if an axis divides."""
    size = 1
    for side in shape:
        size *= side
    fits = any(side % COUNT == 0 for side in shape[int(name.startswith("layers.")) :])
    return size // COUNT if fits else size


def test_the_tracer_plans_what_a_run_on_several_host_devices_compiles() -> None:
    changes = {
        "backend": "jax",
        "device.name": "cpu",
        "device.count": 2,
        "optimize.sharding": "fsdp",
    }
    plan = replace(Plan(), changes | {"model.target_params": 200_000} | SIZES | CHUNKED)
    answer = trace.answer(TracerQuestion(id=1, plan=dumps(plan), kind="cpu"), lambda: None)
    assert answer.exact is not None, answer.problem
    code = (
        "import json, sys\n"
        "from memconsole.plan import catalog, plan_file\n"
        "from memconsole_jax.engine import create\n"
        "from memconsole_trainer.weights.initialize import InitialWeights\n"
        "plan = plan_file.loads(sys.stdin.read()); model = catalog.model(plan)\n"
        "engine = create(plan, None)\n"
        "engine.build(plan, model, 10, InitialWeights(model, 0))\n"
        "from tests.training.harness.step_memory import step_memory\n"
        "own = step_memory(engine)\n"
        "arguments = own.argument_size_in_bytes\n"
        "needed = arguments + own.output_size_in_bytes - own.alias_size_in_bytes + own.temp_size_in_bytes\n"
        "print(json.dumps([arguments, needed]))\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        input=dumps(plan),
        env=trainer_environment(plan, os.environ, kind="cpu"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    arguments, needed = json.loads(run.stdout.splitlines()[-1])
    step = answer.exact.phases[answer.exact.program_phase]
    assert step.total_bytes == needed
    assert sum(step.components.values()) == pytest.approx(arguments, abs=64)


def test_slices_of_tpus_grow_as_googles_do() -> None:
    assert [*islice(trace_targets.slices("v5e:2x2"), 4)] == [
        "v5e:2x2", "v5e:2x4", "v5e:4x4", "v5e:4x8",
    ]  # fmt: skip
    assert [*islice(trace_targets.slices("v5p:2x2x1"), 5)] == [
        "v5p:2x2x1", "v5p:2x2x2", "v5p:2x2x4", "v5p:2x4x4", "v5p:4x4x4",
    ]  # fmt: skip


@pytest.mark.parametrize("device", ["h100-80gb", "tpu-v5e"])
def test_devices_that_are_not_here_are_compiled_for_together(device: str) -> None:
    """Runs where the optional compilers are installed."""
    if device == "h100-80gb" and trace_targets._cuda_plugin() is None:
        pytest.skip('the CUDA plugin is not installed: pip install "memconsole[cuda-plan]"')
    if device == "tpu-v5e":
        pytest.importorskip("libtpu", reason='pip install "memconsole[tpu]"')
    kind = catalog.catalog_device(device).kind
    place = trace_targets.target(device, kind, 8, 2)
    assert len(place.devices) == 8
    changes = {"backend": "jax", "device.name": device, "device.count": 8, **SIZES}
    plan = replace(Plan(), changes | {"optimize.sharding": "fsdp"} | CHUNKED)
    found = planned_step(plan, WIDE, place)
    assert found.arguments < 3 * BYTES / 7
    if kind == "gpu":
        assert "connects the devices" in place.caveat
        assert {d.process_index for d in place.devices} == {0, 1}
