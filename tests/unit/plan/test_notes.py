"""Notes on a plan: what to know of an optimization before a run starts, without a refusal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from memconsole.announcing import launch_rows
from memconsole.cli.plans.plan_words import document, text
from memconsole.memory.estimate import estimate
from memconsole.plan import catalog
from memconsole.plan.plan import Plan, replace
from memconsole.plan.toggles.optimization import Length
from memconsole.plan.toggles.optimizations import check_conflicts, notes
from memconsole.tui.plan.widgets.plan_summary import summary_lines
from memconsole.tui.views.plan_view import PlanView
from memconsole_trainer.control.phases import Phases
from tests.unit.memory.cards import card


def hybrid(**changes: Any) -> Plan:
    named = {key.replace("__", "."): value for key, value in changes.items()}
    return replace(Plan(), {"device.name": "cpu", "hybrid.mode": "conservative", **named})


def first_predicted(plan: Plan) -> int:
    """The first step of a run that predicts, if nothing speaks against it."""
    phases, step = Phases.begin(plan.hybrid), 1
    while phases.phase != "predict":
        phases.after_step(plan.hybrid, confidence=1.0, ready=True)
        step += 1
    return step


def told(plan: Plan, steps: int, *, known: bool = True) -> list[str]:
    return [note.words for note in notes(plan, "gpu", Length(steps, known))]


@pytest.mark.parametrize(
    "plan", [hybrid(), hybrid(hybrid__mode="balanced"), hybrid(hybrid__warmup_steps=0)]
)
def test_a_run_is_too_short_up_to_the_step_before_its_first_predict_phase(plan: Plan) -> None:
    first = first_predicted(plan)
    (words,) = told(plan, first - 1)
    assert f"{first - 1:,} steps come first, the run has {first - 1:,}; shorten hybrid." in words
    assert told(plan, first) == []
    check_conflicts(plan)


def test_a_guessed_number_of_steps_may_be_too_high() -> None:
    assert told(hybrid(), 240) == []
    (words,) = told(hybrid(), 240, known=False)
    assert (
        "may end before its first predict phase: 230 steps come first, the run has about 240"
        in words
    )
    assert told(hybrid(), 300, known=False) == []
    assert notes(hybrid(), "gpu", Length(None, False)) == ()


@pytest.mark.parametrize(
    ("changes", "steps", "keys"),
    [
        ({}, 100, "hybrid.warmup_steps"),
        ({}, 20, "hybrid.warmup_steps and hybrid.full_steps"),
        ({"hybrid__warmup_steps": 0}, 20, "hybrid.full_steps"),
    ],
)
def test_what_is_to_be_shortened_is_named(changes: dict[str, Any], steps: int, keys: str) -> None:
    (words,) = told(hybrid(**changes), steps)
    assert words.endswith(f"; shorten {keys}")


def test_notes_are_told_by_the_plan_and_before_a_launch() -> None:
    plan = hybrid(train__max_steps=100)
    found = estimate(plan, card(2**34))
    (note,) = found.notes
    assert f"\nnote: {note.words}\n" in text(plan, found)
    assert document(plan, found)["notes"] == [{"key": "hybrid.mode", "words": note.words}]
    assert ("note", note.words) in launch_rows(plan, found)
    plain = replace(plan, {"hybrid.mode": "off"})
    assert estimate(plain, card(2**34)).notes == ()


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_on_a_cpu_the_defaults_hold_more_in_a_predict_phase_and_the_note_names_what_holds_less(
    backend: str,
) -> None:
    plan = hybrid(backend=backend, train__max_steps=1000)
    budget = card(2**36, "cpu")
    (note,) = estimate(plan, budget).notes
    assert note.words == (
        "on a CPU a predict phase holds a second copy of the weights and the optimizer state; "
        "hybrid.predict_precision = same and hybrid.memory = compress hold less"
    )
    assert notes(plan, "gpu", Length(1000, True)) == ()
    same = replace(plan, {"hybrid.predict_precision": "same"})
    both = replace(same, {"hybrid.memory": "compress"})
    (left,) = estimate(same, budget).notes
    assert left.words == (
        "on a CPU a predict phase holds the optimizer state; hybrid.memory = compress holds less"
    )
    assert estimate(both, budget).notes == ()
    held = [estimate(one, budget).table.phases["predict"] for one in (plan, same, both)]
    assert held == sorted(held, reverse=True)
    assert len(set(held)) == 3


def test_a_note_names_no_setting_that_would_be_refused() -> None:
    plan = hybrid(optimize__optimizer="adamw-8bit")
    (note,) = notes(plan, "cpu", Length(1000, True))
    assert "hybrid.memory" not in note.words
    narrow = hybrid(optimize__precision="bf16", hybrid__memory="reinitialize")
    assert notes(narrow, "cpu", Length(1000, True)) == ()


def test_rows_longer_than_the_positions_that_a_model_was_made_for_are_noted() -> None:
    fixed = replace(Plan(), {"model.name": "llama-3.2-1b", "data.sequence_length": 131_072})
    assert told(fixed, 300) == []
    (words,) = told(replace(fixed, {"data.sequence_length": 131_080}), 300)
    assert words == (
        "data.sequence_length = 131,080: llama-3.2-1b was made for 131,072 positions; it trains on "
        "longer rows, but samples, answers and exports hold 131,072"
    )
    sized = replace(Plan(), {"data.sequence_length": 16_384})
    assert told(sized, 300) == [], "a sized model is made with as many positions as a row has"


def test_long_rows_of_isolated_documents_are_noted_for_longrope(tmp_path: Path) -> None:
    config = {
        "model_type": "phi3", "vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 2, "intermediate_size": 64, "max_position_embeddings": 512,
        "original_max_position_embeddings": 64,
        "rope_scaling": {"type": "longrope", "short_factor": [1] * 8, "long_factor": [2] * 8},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    own = {"model.name": str(tmp_path), "data.isolate_documents": True}
    assert told(replace(Plan(), {**own, "data.sequence_length": 64}), 300) == []
    (words,) = told(replace(Plan(), {**own, "data.sequence_length": 128}), 300)
    assert "in rows longer than 64 tokens LongRoPE" in words


@pytest.mark.parametrize(
    ("preset", "frozen", "cure"),
    [
        ("efficientids", {"optimize.freeze_base": True}, "optimize.freeze_base = false"),
        (
            "default",
            {"optimize.lora_rank": 8, "optimize.freeze_base": True},
            "optimize.lora_rank = 0 and optimize.freeze_base = false",
        ),
    ],
)
def test_frozen_random_weights_are_noted(preset: str, frozen: dict[str, Any], cure: str) -> None:
    plan = replace(catalog.preset(preset), {"model.weights": "random", **frozen})
    if preset == "efficientids":
        plan = replace(plan, {"model.items": 1000})
    found = estimate(plan, card(2**34))
    (note,) = found.notes
    assert note.words == (
        f"the frozen weights are random: nothing was trained into them; set {cure} to train them"
    )
    assert ("note", note.words) in launch_rows(plan, found)
    shown = summary_lines(PlanView(plan, estimate=found, stale=False), 60, 8)
    assert "frozen weights random" in "".join(span.text for line in shown for span in line)
    assert told(replace(plan, {key: type(value)() for key, value in frozen.items()}), 300) == []
    assert told(replace(plan, {"model.weights": "/run/checkpoints/best"}), 300) == []


def test_the_preset_of_a_recommender_trains_its_random_decoder() -> None:
    assert not catalog.preset("efficientids").optimize.freeze_base
