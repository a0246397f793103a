"""Documents packed into one row do not see one another: as if each had a row of its own, in both backends."""

from __future__ import annotations

import importlib
import random
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from memconsole.memory.activations import jax_step, torch_step
from memconsole.memory.exact import affine
from memconsole.memory.state.step_sizes import step_of
from memconsole.plan.models.architecture import Architecture
from memconsole.plan.plan import Plan, PlanError, replace
from memconsole.plan.tasks.language import MASKED
from memconsole.runs.act.trainer.attempt import Attempt
from memconsole.runs.record.directory import RunDirectory
from memconsole.runs.record.run_store import create_run
from memconsole_trainer.__main__ import run as run_attempt
from memconsole_trainer.backends import engine_factory
from memconsole_trainer.data.stream import BatchShape
from memconsole_trainer.data.text.portion import boundary
from memconsole_trainer.data.text.rows.batches import Boundary, language_batch, make_batch
from memconsole_trainer.data.text.tokens.tokenizer import train
from memconsole_trainer.engine import Batch
from memconsole_trainer.weights.initialize import InitialWeights
from tests.training.harness import tiny_models
from tests.training.harness.runs import state_hashes

BACKENDS = ("torch", "jax")
FAMILIES = ("gpt2", "llama", "llama-scaled", "gemma3")
END, VOCABULARY, LENGTH = 0, 96, 24
LENGTHS = ((7, 5, 12), (24,), (1, 20, 3), (11, 13))
"""Of the documents of each packed row, with the end-of-text token that opens each."""


def architecture(name: str) -> Architecture:
    """A family's, whose window, where it has one, is shorter than some documents."""
    a = tiny_models.ARCHITECTURES[name]
    return a if a.sliding_window is None else msgspec.structs.replace(a, sliding_window=6)


def documents() -> list[list[np.ndarray]]:
    random_ = np.random.default_rng(3)
    rows = []
    for lengths in LENGTHS:
        row = [random_.integers(1, VOCABULARY, n).astype(np.uint16) for n in lengths]
        for document in row:
            document[0] = END
        rows.append(row)
    return rows


def packed(rows: list[list[np.ndarray]], micro_batches: int = 2) -> Batch:
    """Rows as the trainer makes them, a token longer for the last target."""
    extra = np.array([END], dtype=np.uint16)
    joined = [np.concatenate([*row, extra]) for row in rows]
    shape = BatchShape(micro_batches, len(rows) // micro_batches, LENGTH)
    return make_batch(joined, shape, Boundary(END, opens=True))


def alone(rows: list[list[np.ndarray]], micro_batches: int = 3) -> Batch:
    """Each document in a row of its own, padded, with the very targets it has when packed."""
    every = [document for row in rows for document in row]
    inputs = np.zeros((len(every), LENGTH), np.int32)
    targets = np.full((len(every), LENGTH), MASKED, np.int32)
    for index, document in enumerate(every):
        inputs[index, : len(document)] = document
        targets[index, : len(document)] = [*document[1:], END]
    shape = (micro_batches, -1, LENGTH)
    return language_batch(inputs.reshape(shape), targets.reshape(shape))


ROW = np.array([5, 6, END, 8, 9, 7, END, 4, 3], dtype=np.uint16)


def test_the_end_of_text_opens_the_next_document_and_every_target_counts() -> None:
    batch = make_batch([ROW, ROW[2:5]], BatchShape(1, 2, 8), Boundary(END, opens=True))
    assert batch["documents"][0, 0].tolist() == [0, 0, 1, 1, 1, 1, 2, 2]
    assert batch["documents"][0, 1, :3].tolist() == [1, 1, 1]
    assert batch["targets"][0].tolist() == [ROW[1:].tolist(), [8, 9, *[MASKED] * 6]]
    plain = make_batch([ROW, ROW[2:5]], BatchShape(1, 2, 8))
    assert "documents" not in plain.arrays
    assert (plain["targets"] == batch["targets"]).all()


def test_documents_that_begin_on_their_own_end_with_the_end_of_text() -> None:
    batch = make_batch([ROW, ROW[:5]], BatchShape(1, 2, 8), Boundary(END, opens=False))
    assert batch["documents"][0, 0].tolist() == [0, 0, 0, 1, 1, 1, 1, 2]
    assert batch["targets"][0, 0].tolist() == [6, END, MASKED, 9, 7, END, MASKED, 3]
    assert batch["targets"][0, 1].tolist() == [6, END, MASKED, 9, *[MASKED] * 4]
    assert batch.weight == 6 + 3


BEGINS: list[tuple[dict[str, Any], tuple[int, ...], bool]] = [
    ({}, (), True),
    ({}, (END,), True),
    ({}, (7,), False),
    ({"data.template": "equipment"}, (), False),
]


@pytest.mark.parametrize(("data", "begin", "opens"), BEGINS, ids=str)
def test_a_text_without_a_begin_token_of_its_own_begins_after_the_end_of_text(
    data: dict[str, Any], begin: tuple[int, ...], opens: bool
) -> None:
    tokenizer = train(["a few words"], 300)
    tokenizer.begin = begin
    plan = replace(Plan(), {"data.isolate_documents": True, **data})
    assert boundary(plan, tokenizer) == (tokenizer.end_of_text, opens)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_each_document_alone_whatever_stands_beside_it(
    backend: str, family: str
) -> None:
    pytest.importorskip(backend)
    engine = importlib.import_module(f"tests.training.harness.{backend}_comparison")
    a = architecture(family)
    weights, rows = InitialWeights(a, 0), documents()
    together, apart = packed(rows, 1), alone(rows, 1)
    found = engine.logits(a, weights, together["inputs"][0], together["documents"][0])
    single = engine.logits(a, weights, apart["inputs"][0])
    row = 0
    for index, lengths in enumerate(LENGTHS):
        start = 0
        for length in lengths:
            np.testing.assert_allclose(
                found[index, start : start + length], single[row, :length], atol=2e-5
            )
            start, row = start + length, row + 1
    changed = together["inputs"][0].copy()
    changed[0, 7:12] = changed[0, 7:12][::-1] % 90 + 3
    after = engine.logits(a, weights, changed, together["documents"][0])
    np.testing.assert_array_equal(after[0, :7], found[0, :7])
    np.testing.assert_array_equal(after[0, 12:], found[0, 12:])
    assert np.abs(after[0, 7:12] - found[0, 7:12]).max() > 1e-3
    seeing = engine.logits(a, weights, together["inputs"][0])
    assert np.abs(seeing[0, 7:] - found[0, 7:]).max() > 1e-3, (
        "otherwise the later ones see the earlier"
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_documents_in_rows_of_their_own(backend: str, family: str) -> None:
    pytest.importorskip(backend)
    engine = importlib.import_module(f"tests.training.harness.{backend}_comparison")
    a = architecture(family)
    together, apart = (
        engine.gradients(a, InitialWeights(a, 0), batch)
        for batch in (packed(documents()), alone(documents()))
    )
    largest = max(np.abs(gradient).max() for gradient in apart.values())
    for name, gradient in apart.items():
        np.testing.assert_allclose(together[name], gradient, atol=1e-5 * largest, err_msg=name)


SETTINGS: list[dict[str, Any]] = [
    {},
    {"gradient_checkpointing": "full", "fused_loss": True},
    {"gradient_checkpointing": "selective", "lora_rank": 4, "freeze_base": True},
    {"gradient_checkpointing": "full", "activation_offload": True, "optimizer_offload": "pinned"},
    {"precision": "bf16", "optimizer": "adamw-8bit", "fused_loss": True},
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_training_with_other_optimizations_is_that_of_separate_rows(
    backend: str, settings: dict[str, Any]
) -> None:
    pytest.importorskip(backend)
    a, losses = architecture("gemma3"), []
    for batch in (packed(documents()), alone(documents())):
        micro_batches, rows, _ = batch["inputs"].shape
        changes = {f"optimize.{key}": value for key, value in settings.items()}
        plan = replace(
            Plan(),
            {
                "backend": backend, "device.name": "cpu", "data.sequence_length": LENGTH,
                "data.isolate_documents": "documents" in batch.arrays, "train.batch_size": rows,
                "optimize.accumulation_steps": micro_batches, "train.warmup_steps": 1,
                "train.learning_rate": 1e-2, "train.sample_tokens": 0, **changes,
            },
        )  # fmt: skip
        engine = engine_factory(backend)(plan, None)
        engine.build(plan, a, 10, InitialWeights(a, 0))
        for _ in range(4):
            engine.train_step(batch)
        found = [m.loss for m in engine.take_metrics()]
        evaluated = engine.evaluate(
            language_batch(
                batch["inputs"][i : i + 1],
                batch["targets"][i : i + 1],
                None if "documents" not in batch.arrays else batch["documents"][i : i + 1],
            )
            for i in range(micro_batches)
        )
        losses.append([*found, evaluated.mean])
    near = 2e-2 if settings.get("precision") == "bf16" else 1e-4
    assert losses[0] == pytest.approx(losses[1], rel=near)
    assert losses[0][3] < losses[0][0] or settings.get("lora_rank"), "it learns"


@pytest.mark.parametrize(
    "compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]
)
def test_torch_compiles_it_too(compiler: str) -> None:
    torch = pytest.importorskip("torch")
    from memconsole_torch.models import decoder
    from memconsole_torch.techniques import compilation

    compiled = decoder.Decoder(architecture("llama"))
    for weight in compiled.parameters():
        torch.nn.init.normal_(weight, std=0.1)
    batch = packed(documents(), 1)
    inputs, own = torch.from_numpy(batch["inputs"][0]), torch.from_numpy(batch["documents"][0])
    plain = compiled(inputs, own)
    if compiler == "inductor":
        try:
            compilation.check(torch.device("cpu"))
        except PlanError as error:
            pytest.skip(str(error))
        compilation.apply(compiled)
    else:
        for block in compiled.layers:
            block.compile(backend=compiler, fullgraph=True)
    torch.testing.assert_close(compiled(inputs, own), plain, atol=1e-5, rtol=1e-5)


def test_without_an_end_of_text_token_there_are_no_documents_to_tell_apart() -> None:
    plan = replace(Plan(), {"data.isolate_documents": True})
    with pytest.raises(PlanError, match="isolate_documents"):
        boundary(plan, None)
    assert boundary(Plan(), None) is None


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, words = tmp_path_factory.mktemp("text"), random.Random(2)
    for number in range(40):
        line = " ".join(
            words.choice(("cat", "dog", "sat", "ran", "mat")) for _ in range(words.randint(2, 14))
        )
        (folder / f"{number}.txt").write_text(line)
    return folder


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_run_goes_on_exactly_where_it_stopped(
    backend: str, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(backend)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    plan = replace(
        Plan(),
        {
            "backend": backend, "device.name": "cpu", "data.source": str(text),
            "data.vocab_size": 300, "data.sequence_length": 32, "data.isolate_documents": True,
            "data.shuffle_buffer": 8, "data.validation_fraction": 0.2, "model.target_params": 200_000,
            "train.batch_size": 2, "train.max_steps": 8, "train.sample_tokens": 0,
            "train.warmup_steps": 2, "optimize.accumulation_steps": 2,
        },
    )  # fmt: skip

    class Stopping(Attempt):
        def progress(self, phase: str, step: int, bytes_written: int = 0) -> None:
            super().progress(phase, step, bytes_written)
            if step >= 3:
                self.stop_requested = True

    whole, broken = create_run(plan), create_run(plan)

    def go(run: RunDirectory, kind: type[Attempt]) -> int:
        with kind(run, run.new_attempt()) as attempt:
            return run_attempt(attempt)

    assert go(whole, Attempt) == 0
    assert go(broken, Stopping) == 75
    assert go(broken, Attempt) == 0
    assert state_hashes(broken) == state_hashes(whole)
    plain = create_run(replace(plan, {"data.isolate_documents": False}))
    assert go(plain, Attempt) == 0
    assert state_hashes(plain) != state_hashes(whole)


def priced(plan: Plan, a: Architecture, kind: str) -> dict[str, int]:
    timeline = jax_step if plan.backend == "jax" else torch_step
    found: dict[str, int] = {}
    for moment in timeline.moments(step_of(plan, a, kind)):
        found[moment.phase] = max(found.get(moment.phase, 0), moment.total)
    return found


def wide_plan(backend: str, **changes: Any) -> Plan:
    keys = {key.replace("__", "."): value for key, value in changes.items()}
    return replace(
        Plan(),
        {
            "backend": backend, "device.name": "cpu", "data.isolate_documents": True,
            "train.batch_size": 4, "data.sequence_length": 200, **keys,
        },
    )  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "family", "mode"),
    [
        ("cpu", "gpt2", "none"),
        ("gpu", "llama", "none"),
        ("gpu", "gemma3", "full"),
        ("cpu", "gemma3", "none"),
    ],
)
def test_the_torch_formula_and_timeline_are_what_a_trace_finds(
    kind: str, family: str, mode: str
) -> None:
    pytest.importorskip("torch")
    from memconsole_torch.tracing import trace, trace_step

    a = msgspec.structs.replace(architecture(family), vocab_size=1000, max_positions=512)
    changes = {"optimize__gradient_checkpointing": mode, "optimize__precision": "bf16"}
    plan = wide_plan("torch", optimize__accumulation_steps=2, **changes)
    found = trace_step.trace(plan, a, kind).peaks
    recorded = trace.record(plan, a, kind).timeline
    exact = affine.evaluate(recorded, 4, 200)
    formula = priced(plan, a, kind)
    for phase in ("forward", "loss", "backward", "evaluation"):
        near = 2e-2 if kind == "gpu" else 1e-3
        assert exact.phases[phase].total_bytes == pytest.approx(found[phase], rel=near), phase
        assert formula[phase] == pytest.approx(found[phase], rel=0.03), phase
    plain = priced(replace(plan, {"data.isolate_documents": False}), a, kind)
    masks = 4 * 200 * 200 * 2
    assert formula["backward"] - plain["backward"] >= 0.5 * masks


@pytest.mark.parametrize(
    ("family", "mode"), [("gpt2", "none"), ("llama", "full"), ("gemma3", "none")]
)
def test_the_jax_formula_is_near_what_xla_plans_and_no_mask_of_all_rows_is_held(
    family: str, mode: str
) -> None:
    pytest.importorskip("jax")
    from memconsole_jax.tracing import trace_targets
    from tests.training.harness.planned_step import planned_step

    a = msgspec.structs.replace(architecture(family), vocab_size=1000, max_positions=2048)
    needed = []
    for isolated in (False, True):
        plan = wide_plan(
            "jax",
            data__isolate_documents=isolated,
            data__sequence_length=1024,
            optimize__gradient_checkpointing=mode,
            optimize__fused_loss=True,
        )
        planned = planned_step(plan, a, trace_targets.target("", "cpu")).needed
        formula = max(
            total for phase, total in priced(plan, a, "cpu").items()
            if phase not in ("evaluation", "checkpoint")
        )  # fmt: skip
        assert formula == pytest.approx(planned, rel=0.25)
        needed.append(planned)
    tables = 8 * a.head_size * 4 * 1024 * (2 + a.layers)
    one_mask = 4 * 4 * 1024 * 1024  # fp32, of every row; a chunk's comparisons are a part of it
    assert needed[1] - needed[0] < tables + one_mask / 2
