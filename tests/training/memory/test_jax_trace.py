"""The JAX tracer says what the engine's own compiled programs need, and what is missing where it cannot."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import msgspec
import pytest

from memconsole.memory.exact.timeline import TracerAnswer, TracerQuestion
from memconsole.memory.formula import memory_table
from memconsole.plan import catalog
from memconsole.plan.machine.budget import Budget
from memconsole.plan.plan import Plan, replace
from memconsole.plan.plan_file import dumps
from memconsole_jax.engine import create
from memconsole_jax.tracing import trace, trace_targets
from memconsole_trainer.weights.initialize import InitialWeights
from tests.training.harness.step_memory import step_memory

SMALL = {
    "backend": "jax",
    "model.target_params": 500_000,
    "data.sequence_length": 64,
    "train.batch_size": 4,
    "device.name": "cpu",
}
CPU = Budget(
    name="cpu", kind="cpu", memory_label="host RAM", total_bytes=2**34, usable_bytes=2**34, why="test"
)  # fmt: skip


def a_plan(**changes: Any) -> Plan:
    return replace(Plan(), SMALL | {k.replace("__", "."): v for k, v in changes.items()})


@pytest.mark.parametrize(
    "plan",
    [
        a_plan(optimize__accumulation_steps=2, optimize__gradient_checkpointing="full"),
        a_plan(optimize__lora_rank=8, optimize__freeze_base=True, optimize__precision="bf16"),
    ],
    ids=["accumulating", "adapters"],
)
def test_what_is_planned_is_what_the_engine_compiles(plan: Plan) -> None:
    architecture = catalog.architecture(plan)
    exact = trace.planned(plan, architecture, trace_targets.target("", "cpu"))
    engine = create(plan, None)
    engine.build(plan, architecture, 10, InitialWeights(architecture, 0))
    own = step_memory(engine)
    needed = own.argument_size_in_bytes + own.output_size_in_bytes - own.alias_size_in_bytes
    step = exact.phases[exact.program_phase]
    assert step.total_bytes == needed + own.temp_size_in_bytes
    assert sum(step.components.values()) == pytest.approx(own.argument_size_in_bytes, abs=64)
    assert exact.phases["evaluation"].total_bytes < step.total_bytes


@pytest.mark.parametrize(
    "plan",
    [a_plan(train__batch_size=16), a_plan(data__sequence_length=1024, train__batch_size=2)],
    ids=["whole scores", "scores in chunks"],
)
def test_the_formula_of_an_evaluation_is_near_what_xla_plans_for_it(plan: Plan) -> None:
    architecture = catalog.architecture(plan)
    exact = trace.planned(plan, architecture, trace_targets.target("", "cpu"))
    table = memory_table(plan, architecture, CPU)
    tensors = sum(c.at("evaluation") for c in table.components if c.name != "runtime")
    assert tensors == pytest.approx(exact.phases["evaluation"].total_bytes, rel=0.2)


def test_the_process_answers_lines_with_lines() -> None:
    plan = a_plan()
    questions = [
        TracerQuestion(id=7, plan=dumps(plan), kind="cpu"),
        TracerQuestion(id=8, plan=dumps(plan), kind="apple", target="m2-16gb", urgent=False),
        TracerQuestion(id=9, plan=dumps(replace(plan, {"optimize.sharding": "fsdp"})), kind="cpu", urgent=False),
    ]  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-m", "memconsole_jax.tracing.trace"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    answers = []
    for question in questions:
        process.stdin.write(msgspec.json.encode(question) + b"\n")
        process.stdin.flush()
        answers.append(msgspec.json.decode(process.stdout.readline(), type=TracerAnswer))
    process.stdin.close()
    assert process.wait(30) == 0
    exact = answers[0].exact
    assert [a.id for a in answers] == [7, 8, 9]
    assert exact is not None
    assert exact.phases["backward"].components["weights"] > 4 * 450_000
    assert "JAX does not train on it" in answers[1].problem
    assert "optimize.sharding = fsdp" in answers[2].problem


@pytest.mark.parametrize(("device", "extra"), [("tpu-v5e", "tpu"), ("h100-80gb", "cuda-plan")])
def test_a_missing_compiler_is_named_with_what_installs_it(
    device: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(trace_targets, "_cuda_plugin", lambda: None)
    plan = a_plan(device__name=device)
    question = TracerQuestion(id=1, plan=dumps(plan), kind="any", target=device)
    answer = trace.answer(question, lambda: None)
    assert answer.exact is None
    assert f"the extra {extra} of memconsole" in answer.problem


@pytest.mark.parametrize("device", ["h100-80gb", "tpu-v5e"])
def test_a_device_that_is_not_here_is_compiled_for(device: str) -> None:
    """Runs where the optional compilers are installed."""
    present = trace_targets._cuda_plugin() if device == "h100-80gb" else None
    if device == "h100-80gb" and present is None:
        pytest.skip('the CUDA plugin is not installed: pip install "memconsole[cuda-plan]"')
    if device == "tpu-v5e":
        pytest.importorskip("libtpu", reason='pip install "memconsole[tpu]"')
    plan = a_plan(device__name=device, optimize__precision="bf16")
    kind = catalog.catalog_device(device).kind
    exact = trace.planned(plan, catalog.architecture(plan), trace_targets.target(device, kind))
    assert exact.phases["backward"].total_bytes > 12 * 450_000
    assert not exact.out_of_memory


def test_every_catalog_gpu_and_tpu_has_what_the_compiler_must_know() -> None:
    facts = trace_targets._gpus()
    for name, device in catalog.devices().items():
        if device.kind == "gpu":
            assert facts["device"][name]["capability"] in facts["capability"], name
            assert f'device_description_str: "{device.label}"' in trace_targets._config(
                device, facts["device"][name]
            )
        elif device.kind == "tpu":
            assert name in trace_targets.TOPOLOGIES
