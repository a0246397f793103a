"""The torch tracer: its timelines against direct traces and MemTracker, its answers, and its process."""

from __future__ import annotations

import io
import os
import random
import subprocess
import sys
from contextlib import nullcontext

import msgspec
import pytest

from memconsole.memory.coefficients import runtime
from memconsole.memory.exact import affine
from memconsole.memory.exact.timeline import TracerAnswer, TracerQuestion
from memconsole.memory.formula import PHASES, moments
from memconsole.memory.state.step_sizes import step_of
from memconsole.memory.table import COMPONENTS
from memconsole.plan import catalog
from memconsole.plan.models.architecture import Architecture
from memconsole.plan.models.recommender import Recommender
from memconsole.plan.plan import Plan, replace
from memconsole.plan.plan_file import dumps

torch = pytest.importorskip("torch")

from memconsole_torch.models import linear
from memconsole_torch.tracing import trace, trace_devices, trace_sizes, trace_step
from memconsole_torch.tracing.trace_liveness import Liveness
from memconsole_trainer import tracing
from tests.accuracy import torch_exact
from tests.accuracy.random_plans import describe, draw
from tests.training.harness.grids import spread

KINDS = ("cpu", "gpu", "apple")


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also without the few MiB that oneDNN's gradients of weights take for a moment on some processors: no trace has them."""
    torch.set_num_threads(1)
    monkeypatch.setattr(linear, "_is_far_faster", lambda: False)


def tiny(**changes: object) -> tuple[Architecture, Plan]:
    """A small grouped-query model with a sliding window."""
    architecture = Architecture(
        family="gemma3", vocab_size=1000, hidden_size=64, layers=2, heads=4, kv_heads=2,
        head_size=16, intermediate_size=128, max_positions=512, query_key_norm=True,
        post_norms=True, sliding_window=48, global_every=2,
    )  # fmt: skip
    keys = {name.replace("__", "."): value for name, value in changes.items()}
    return architecture, replace(
        Plan(), {"train.batch_size": 4, "data.sequence_length": 64, **keys}
    )


@pytest.mark.parametrize("seed", range(6))
def test_a_timeline_is_what_a_direct_trace_finds_at_other_sizes(seed: int) -> None:
    """Families, precisions, checkpointing, optimizers, losses and devices are drawn; sizes too."""
    rng = random.Random(seed)
    architecture, plan = draw(rng, "torch")
    kind = KINDS[seed % 3]
    plan = replace(plan, {"optimize.accumulation_steps": rng.choice((1, 3))})
    timeline = trace.record(plan, architecture, kind).timeline
    assert timeline.only is None, describe(plan, architecture)
    assert affine.covers(timeline, plan, architecture, kind)
    for batch, length in ((2, 96), (3, 64), (5, 256), (9, 256)):
        other = replace(plan, {"train.batch_size": batch, "data.sequence_length": length})
        if not affine.covers(timeline, other, architecture, kind):
            continue
        expected = trace_step.trace(other, architecture, kind).peaks
        found = affine.evaluate(timeline, batch, length)
        for phase in PHASES:
            # A card's blocks are rounded up to 512 bytes, which a trace on the CPU is not.
            near = 1e-3 if kind != "gpu" else 2e-2
            assert found.phases[phase].total_bytes == pytest.approx(expected[phase], rel=near)


@pytest.mark.parametrize(("tokens", "fused"), spread([(4, 64), (3, 512), (5, 512)], [False, True]))
def test_one_two_and_many_chunks_of_the_loss_are_told_apart(
    tokens: tuple[int, int], fused: bool
) -> None:
    batch, length = tokens
    architecture, plan = tiny(optimize__fused_loss=fused)
    plan = replace(plan, {"train.batch_size": batch, "data.sequence_length": length})
    timeline = trace.record(plan, architecture, "cpu").timeline
    expected = trace_step.trace(plan, architecture).peaks
    exact = affine.evaluate(timeline, batch, length)
    for phase in PHASES:
        assert exact.phases[phase].total_bytes == pytest.approx(expected[phase], rel=1e-3), phase
    wider = replace(plan, {"train.batch_size": batch + 10})
    alike = affine.chunks(plan.micro_batch_tokens) == affine.chunks(wider.micro_batch_tokens)
    assert affine.covers(timeline, wider, architecture, "cpu") == alike


def test_attention_with_dropout_is_traced_for_some_queries_or_for_all() -> None:
    architecture, plan = tiny(train__attention_dropout=0.1, train__batch_size=5)
    short, long = (replace(plan, {"data.sequence_length": length}) for length in (100, 312))
    timelines = []
    for one in (short, long):
        timeline = trace.record(one, architecture, "cpu").timeline
        assert timeline.only is None
        expected = trace_step.trace(one, architecture).peaks
        exact = affine.evaluate(timeline, 5, one.data.sequence_length)
        for phase in PHASES:
            assert exact.phases[phase].total_bytes == pytest.approx(expected[phase], rel=1e-3)
        timelines.append(timeline)
    assert not affine.covers(timelines[0], long, architecture, "cpu")


def test_components_add_up_and_are_what_the_plan_says() -> None:
    architecture, plan = tiny(optimize__precision="bf16", optimize__accumulation_steps=3)
    timeline = trace.record(plan, architecture, "gpu").timeline
    exact = affine.evaluate(timeline, 4, 64)
    for phase in exact.phases.values():
        assert sum(phase.components.values()) == phase.total_bytes
        assert set(phase.components) <= set(COMPONENTS)
    step = exact.phases["optimizer step"].components
    trained = step["gradients"]
    assert step["optimizer state"] == pytest.approx(2 * trained, rel=0.02)
    assert step["weights"] == pytest.approx(trained, rel=0.02)
    assert exact.phases["loss"].components["gradients"] == trained  # of the micro-batch before
    assert exact.phases["checkpoint"].components.keys() == {"weights", "optimizer state"}
    once = replace(plan, {"optimize.accumulation_steps": 1})
    alone = affine.evaluate(trace.record(once, architecture, "gpu").timeline, 4, 64)
    assert "gradients" not in alone.phases["loss"].components


@pytest.mark.parametrize("seed", [5000, 5003, 5005])
def test_the_trace_agrees_with_pytorchs_own_tracker(seed: int) -> None:
    for case in torch_exact.compare(seed):
        assert abs(case.error) <= 0.01, case


@pytest.mark.parametrize(
    "optimizer", ["adamw", "adamw-8bit", "adamw8-all", "adafactor", "lion", "sgd"]
)
def test_every_step_is_like_the_first_and_remembering_changes_nothing(optimizer: str) -> None:
    architecture, plan = tiny(optimize__optimizer=optimizer)
    once = trace_step.trace(plan, architecture, "gpu").peaks
    assert once == trace_step.trace(plan, architecture, "gpu", cached=False).peaks
    twice = trace_step.trace(plan, architecture, "gpu", steps=2).peaks
    assert once == {phase: pytest.approx(size, abs=64) for phase, size in twice.items()}


def test_attention_is_traced_as_each_device_computes_it() -> None:
    """CUDA's kernels keep no scores; MPS keeps them."""
    architecture = msgspec.structs.replace(tiny()[0], sliding_window=None)
    length = 256
    scores = 4 * architecture.heads * 4 * length * length  # of one layer, fp32

    def forward(kind: str, precision: str) -> int:
        _, plan = tiny(optimize__precision=precision, data__sequence_length=length)
        return trace_step.trace(plan, architecture, kind).peaks["forward"]

    assert forward("apple", "fp32") - forward("gpu", "fp32") > scores
    assert forward("gpu", "bf16") < forward("gpu", "fp32")


def test_every_part_of_the_backend_widens_the_slices_of_another_device() -> None:
    with trace_devices.emulated("gpu", aligned=True):
        sizes = {
            name: module.CPU_SLICE
            for name, module in sys.modules.items()
            if name.startswith("memconsole_torch.") and hasattr(module, "CPU_SLICE")
        }
    defining = sizes.pop("memconsole_torch.techniques.optimizer.stochastic")
    assert len(sizes) >= 5
    assert min(sizes.values()) > defining


def test_no_fused_update_on_mps_and_wider_slices_off_the_cpu() -> None:
    architecture, plan = tiny()
    step = "optimizer step"
    fused = trace_step.trace(plan, architecture, "gpu").peaks[step]
    assert trace_step.trace(plan, architecture, "apple").peaks[step] > fused + 4 * 64 * 1000
    eight = replace(plan, {"optimize.optimizer": "adamw-8bit"})
    narrow = trace_step.trace(eight, architecture, "cpu").peaks[step]
    slices = {
        kind: trace_step.trace(eight, architecture, kind).peaks[step] - narrow
        for kind in ("gpu", "apple")
    }
    assert slices["gpu"] == pytest.approx(-16 * 2**17, rel=0.01)  # its program needs no slices
    assert slices["apple"] == pytest.approx(16 * (2**22 - 2**17), rel=0.01)


def test_a_real_model_is_answered_with_reserved_bytes_and_no_weights_in_memory() -> None:
    plan = replace(
        Plan(), {"model.name": "gpt2", "data.sequence_length": 1024, "train.batch_size": 8}
    )
    tracer = trace.Tracer()
    answer = tracer.answer(TracerQuestion(id=7, plan=dumps(plan), kind="gpu"))
    assert (answer.id, answer.problem) == (7, "")
    exact, timeline = answer.exact, answer.timeline
    assert exact is not None
    assert timeline is not None
    assert exact.reserved_bytes is not None
    assert exact.least_bytes is not None
    peak = max(phase.total_bytes for phase in exact.phases.values())
    assert peak <= exact.least_bytes <= exact.reserved_bytes <= 1.3 * peak
    weights = exact.phases["checkpoint"].components["weights"]
    assert weights == pytest.approx(4 * 124_439_808, rel=1e-4)
    # The same structure is not traced again: other sizes come from the recording.
    other = replace(plan, {"train.batch_size": 16})
    assert affine.covers(timeline, other, catalog.architecture(other), "gpu")
    before = len(tracer._recordings)
    tracer.answer(TracerQuestion(id=8, plan=dumps(other), kind="gpu"))
    assert len(tracer._recordings) == before


@pytest.mark.parametrize("held", [False, True])
def test_gradients_are_added_in_place_where_autograd_does_so(held: bool) -> None:
    """A weight is used twice. Its second gradient is added to the first one, unless that is held elsewhere."""
    rows = 1000
    made: list[int] = []
    kept: list[torch.Tensor] = []

    class Use(torch.autograd.Function):
        @staticmethod
        def forward(ctx, weight):  # type: ignore[no-untyped-def]
            return weight.new_zeros(())

        @staticmethod
        def backward(ctx, gradient):  # type: ignore[no-untyped-def]
            found = torch.ones(rows)
            made.append(found.data_ptr())
            if held:
                kept.append(found)
            return found

    def run(live: Liveness | None) -> tuple[bool, int]:
        made.clear()
        kept.clear()
        weight = torch.ones(rows, requires_grad=True)
        with live or nullcontext():
            (Use.apply(weight) + Use.apply(weight)).backward()
        assert weight.grad is not None
        peak = 0 if live is None else live.peaks["build"]
        return weight.grad.data_ptr() == made[0], peak

    in_place, _ = run(None)
    traced, peak = run(Liveness())
    assert in_place == traced == (not held)
    assert peak // (4 * rows) == 1 + (3 if held else 2), "the weight, and its gradients"
    assert run(Liveness(internal=False))[0] is False, "MemTracker sees a third tensor, as any mode"


MEASURED: tuple[tuple[int, dict[str, object]], ...] = (
    (
        19_990,
        {
            "model.name": "llama-3.2-1b", "train.batch_size": 2, "data.sequence_length": 2048,
            "optimize.gradient_checkpointing": "full",
        },
    ),
    (
        14_451,
        {
            "model.name": "llama-3.2-1b", "train.batch_size": 4, "data.sequence_length": 1024,
            "optimize.gradient_checkpointing": "full", "optimize.optimizer": "adamw-8bit",
            "optimize.fused_loss": True,
        },
    ),
    (
        3_884,
        {
            "model.name": "efficientids-llama-3.2-1b", "model.items": 20_000, "data.source": "ratings",
            "train.batch_size": 8, "data.sequence_length": 128, "optimize.freeze_base": True,
        },
    ),
)  # fmt: skip
"""max_memory_allocated on an H100, in MiB, of plans in bf16 whose gradients are added in place."""


@pytest.mark.parametrize(("measured", "changes"), MEASURED)
def test_trace_and_formula_are_what_a_card_holds(measured: int, changes: dict[str, object]) -> None:
    plan = replace(Plan(), {"optimize.precision": "bf16", "data.tokenizer": "none", **changes})
    model = catalog.model(plan)
    rows, length = plan.train.batch_size, plan.data.sequence_length
    exact = affine.evaluate(trace.record(plan, model, "gpu").timeline, rows, length)
    traced = max(phase.total_bytes for phase in exact.phases.values())
    formula = max(moment.total for moment in moments(step_of(plan, model, "gpu")))
    card = measured * 2**20 - runtime("torch", "gpu", "h100-80gb").workspace_bytes
    assert (traced, formula) == (pytest.approx(card, rel=0.002), pytest.approx(card, rel=0.002))


def test_a_timeline_keeps_only_moments_that_can_be_the_largest() -> None:
    architecture, plan = tiny(optimize__gradient_checkpointing="selective")
    timeline = trace.record(plan, architecture, "gpu").timeline
    assert 0 < sum(map(len, timeline.phases.values())) < 200


@pytest.mark.parametrize("model", sorted(catalog.models()))
def test_every_model_of_the_catalog_has_sizes_that_tell(model: str) -> None:
    for batch, length in ((1, 128), (1, 512), (4, 512), (32, 64)):
        changes = {"model.name": model, "train.batch_size": batch, "data.sequence_length": length}
        plan = replace(Plan(), changes)
        found = catalog.model(plan)
        sizes = trace_sizes.distinct_sizes(plan, found)
        if isinstance(found, Recommender):
            assert sizes is None
            continue
        assert sizes is not None, (batch, length)
        assert (sizes.batch == 1) == (batch == 1)
        pairs = replace(plan, {"train.objective": "dpo"})
        assert trace_sizes.distinct_sizes(pairs, found) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"optimize.sharding": "fsdp"},
        {"optimize.sharding": "fsdp", "device.count": 2, "optimize.compile": True},
    ],
)
def test_what_is_priced_but_not_trained_is_refused_by_name(changes: dict[str, object]) -> None:
    plan = replace(Plan(), changes)
    answer = trace.Tracer().answer(TracerQuestion(id=1, plan=dumps(plan), kind="gpu"))
    assert answer.exact is None
    assert next(iter(changes)) in answer.problem


def test_sizes_tell_what_bytes_are_proportional_to() -> None:
    architecture, plan = tiny(train__batch_size=8, data__sequence_length=512)
    sizes = trace_sizes.distinct_sizes(plan, architecture)
    assert sizes is not None
    b, s, c, r = sizes.batch, sizes.length, sizes.chunk, sizes.rest
    assert 2 * c + r == b * s
    by_length = [term for term in affine.TERMS if term != "B"]
    values = dict(zip(by_length, (1, s, b * s, s * s, b * s * s, c, r), strict=True))
    for place, value in enumerate(values.values()):
        found = sizes.coefficient(1024 * value)
        assert (found.term, found.factor) == (place, 1024)
    with pytest.raises(trace_sizes.AmbiguousSizeError):
        sizes.coefficient(64 * b)
    regression = replace(Plan(), {"model.name": "lqr"})
    by_row = trace_sizes.distinct_sizes(regression, catalog.model(regression))
    assert by_row is not None
    found = by_row.coefficient(24 * by_row.batch)
    assert (affine.TERMS[found.term], found.factor) == ("B", 24)


RECOMMENDER = {
    "model.name": "efficientids", "model.items": 500, "model.weights": "random",
    "data.source": "ratings", "data.sequence_length": 24, "train.batch_size": 5,
}  # fmt: skip


@pytest.mark.parametrize("storage", ["int8", "nf4"])
def test_a_quantized_base_of_a_recommender_is_traced(storage: str) -> None:
    frozen = {"optimize.freeze_base": True, "optimize.base_storage": storage}
    plan = replace(Plan(), RECOMMENDER | frozen)
    question = TracerQuestion(id=1, plan=dumps(plan), kind="cpu")
    answer = trace.Tracer().answer(question)
    assert answer.exact is not None, answer.problem
    rounded = dumps(replace(plan, {"optimize.base_storage": "none"}))
    other = trace.Tracer().answer(msgspec.structs.replace(question, plan=rounded))
    assert other.exact is not None, other.problem
    quantized, whole = (
        one.phases["checkpoint"].components["weights"] for one in (answer.exact, other.exact)
    )
    assert quantized < whole


def test_a_recommender_is_traced_with_the_chunks_of_its_own_size() -> None:
    plan = replace(Plan(), RECOMMENDER | {"model.items": 2000})
    model = catalog.model(plan)
    expected = trace_step.trace(plan, model).peaks
    answer = trace.Tracer().answer(TracerQuestion(id=1, plan=dumps(plan), kind="cpu"))
    assert answer.exact is not None
    for phase in PHASES:
        assert answer.exact.phases[phase].total_bytes == pytest.approx(expected[phase], rel=1e-3)


def test_an_unexpected_exception_is_answered_and_the_next_question_too() -> None:
    source, sink = os.pipe()
    said = io.BytesIO()
    with open(source, "rb") as questions, open(sink, "wb", buffering=0) as asking:

        def answer(question: TracerQuestion, interrupt: tracing.Interrupt) -> TracerAnswer:
            if question.id == 1:
                raise AttributeError("no\nreshape")
            asking.close()
            return TracerAnswer(id=question.id)

        for number in (1, 2):
            question = TracerQuestion(id=number, plan="", kind="cpu", urgent=False)
            asking.write(msgspec.json.encode(question) + b"\n")
        tracing.serve(answer, questions, said)
    failed, answered = (
        msgspec.json.decode(line, type=TracerAnswer) for line in said.getvalue().splitlines()
    )
    assert failed.problem == "the tracer raised AttributeError: no reshape"
    assert answered.problem == ""


def test_the_process_answers_until_its_input_closes_and_drops_neighbours() -> None:
    command = [sys.executable, "-m", "memconsole_torch.tracing.trace"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        text = dumps(Plan())
        questions = [TracerQuestion(id=i, plan=text, kind="cpu", urgent=False) for i in (1, 2, 3)]
        questions.append(TracerQuestion(id=4, plan=text, kind="cpu"))
        lines = b"".join(msgspec.json.encode(question) + b"\n" for question in questions)
        process.stdin.write(b"not json\n" + lines)
        process.stdin.flush()
        answers = {}
        while 4 not in answers:
            answer = msgspec.json.decode(process.stdout.readline(), type=TracerAnswer)
            answers[answer.id] = answer
        process.stdin.close()
        assert process.wait(30) == 0
    assert answers[4].exact is not None
    assert [answers[i].problem for i in (1, 2, 3)] == [tracing.DROPPED] * 3
