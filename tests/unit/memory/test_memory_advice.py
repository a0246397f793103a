"""Remedies for a plan that does not fit, and the largest batch and sequence that do."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from memconsole.cli.main import cli
from memconsole.memory.answers.advice import (
    ORDER,
    largest_micro_batch,
    largest_sequence_length,
    remedies,
)
from memconsole.memory.estimate import estimate, model_of, table_of
from memconsole.memory.verdict import Verdict
from memconsole.plan import plan as plans
from memconsole.plan.check import check, check_start
from memconsole.plan.plan import Plan
from memconsole.plan.toggles.optimizations import OPTIMIZATIONS
from tests.unit.memory.cards import card

GIB = 2**30
PLAN = plans.replace(
    Plan(), {"model.name": "smollm2-135m", "data.sequence_length": 1024, "train.batch_size": 16}
)


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_every_remedy_saves_what_it_says_and_comes_in_the_troubleshooting_order(
    backend: str,
) -> None:
    plan = plans.replace(PLAN, {"backend": backend})
    budget = card(12 * GIB)
    before = table_of(plan, budget)
    assert not before.fits
    found = remedies(plan, budget)
    assert found
    for remedy in found:
        after = table_of(plans.replace(plan, remedy.changes), budget)
        assert remedy.saves_bytes == before.device_bytes - after.device_bytes > 0
        assert remedy.verdict is after.verdict
        assert remedy.fits == after.fits
    places = [ORDER.index(r.key) for r in found]
    assert places == sorted(places)


def test_a_remedy_that_fits_changes_no_more_than_it_must() -> None:
    budget = card(12 * GIB)
    split = next(r for r in remedies(PLAN, budget) if "optimize.accumulation_steps" in r.changes)
    assert split.fits
    steps = split.changes["optimize.accumulation_steps"]
    assert split.changes["train.batch_size"] * steps == PLAN.train.batch_size
    half = {
        "optimize.accumulation_steps": steps // 2,
        "train.batch_size": 2 * split.changes["train.batch_size"],
    }
    assert split.verdict is Verdict.FITS
    assert table_of(plans.replace(PLAN, half), budget).verdict is not Verdict.FITS


def test_every_optimization_that_saves_memory_and_is_trained_is_offered_or_says_why_not() -> None:
    """Not offered: sharding, which nothing trains; compiling, which is meant to save time; and what a smaller
    micro-batch or longer strides would do is done by accumulation and by less work."""
    assert {row.key for row in OPTIMIZATIONS if row.remedy is None} == {
        "optimize.sharding", "optimize.compile", "train.batch_size", "data.stride",
    }  # fmt: skip
    assert set(ORDER) == {row.key for row in OPTIMIZATIONS if row.remedy} | {"model.target_params"}


def test_offloads_and_an_update_in_the_backward_pass_are_remedies() -> None:
    found = {r.key: r for r in remedies(PLAN, card(12 * GIB))}
    assert found["optimize.activation_offload"].result == ""
    assert found["optimize.optimizer_offload"].result == ""
    assert found["optimize.activation_offload"].label == "activation offload: on"
    roomy = plans.replace(PLAN, {"train.batch_size": 1, "data.sequence_length": 128})
    found = {r.key: r for r in remedies(roomy, card(2 * GIB))}
    updating = found["optimize.optimizer_in_backward"]
    assert updating.changes == {"optimize.optimizer_in_backward": True, "train.grad_clip": 0.0}
    assert updating.result == "gradients are not clipped"
    unclipped = plans.replace(roomy, {"train.grad_clip": 0.0})
    found = {r.key: r for r in remedies(unclipped, card(2 * GIB))}
    assert found["optimize.optimizer_in_backward"].changes == {
        "optimize.optimizer_in_backward": True
    }
    assert found["optimize.optimizer_in_backward"].result == ""


def test_adapters_are_offered_on_loaded_weights_alone_and_say_what_they_change(
    tmp_path: Path,
) -> None:
    """Adapters on a base of new weights learn little: models of the catalog begin with such."""
    budget = card(4 * GIB)
    new = plans.replace(PLAN, {"train.batch_size": 1, "data.sequence_length": 128})
    assert "optimize.lora_rank" not in {r.key for r in remedies(new, budget)}
    config = {
        "model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 1536,
        "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "tie_word_embeddings": True, "hidden_act": "silu",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = plans.replace(new, {"model.name": str(tmp_path)})
    found = {r.key: r for r in remedies(loaded, card(2 * GIB))}
    adapters = found["optimize.lora_rank"]
    assert adapters.result == "adapters instead of the whole model"
    assert adapters.changes["optimize.freeze_base"] is True
    assert adapters.saves_bytes > GIB // 2
    adapted = plans.replace(loaded, {"optimize.lora_rank": 16, "optimize.freeze_base": True})
    found = {r.key: r for r in remedies(adapted, card(GIB // 4))}
    assert found["optimize.lora_rank"].changes["optimize.lora_rank"] == 8
    assert found["optimize.base_storage"].result == "quantized frozen weights"


def test_values_of_remedies_are_words_and_those_of_savings_what_set_takes() -> None:
    """On and off beside a name, true and false beside a setting, never True and False."""
    found = remedies(plans.replace(PLAN, {"data.source": "tinystories"}), card(2 * GIB, "cpu"))
    labels = [remedy.label for remedy in found]
    assert "chunked loss: on" in labels
    assert not [label for label in labels if "True" in label or "False" in label]
    printed = CliRunner().invoke(cli, ["plan", "--set", "device.name=rtx-4090"]).stdout
    (line,) = [line for line in printed.splitlines() if line.startswith("optimize.fused_loss")]
    assert line.split()[1] == "true"
    assert "True" not in printed
    assert "False" not in printed


def test_a_rank_alone_freezes_the_base() -> None:
    alone = plans.apply_settings(Plan(), ["optimize.lora_rank=16", "model.weights=random"])
    both = plans.replace(alone, {"optimize.freeze_base": True})
    check(alone)
    check_start(alone)
    device = card(12 * GIB)
    assert estimate(alone, device).trainable_parameters == estimate(both, device).trainable_parameters  # fmt: skip
    assert table_of(alone, device) == table_of(both, device)
    coded = plans.replace(alone, {"optimize.base_storage": "nf4"})
    check(coded)


def test_an_evaluation_that_is_the_peak_is_made_smaller_without_changing_the_result() -> None:
    plan = plans.replace(PLAN, {"train.batch_size": 1, "train.evaluation_batch_size": 4096})
    budget = card(12 * GIB)
    assert table_of(plan, budget).peak_phase == "evaluation"
    first = remedies(plan, budget)[0]
    assert first.key == "train.evaluation_batch_size"
    assert first.fits
    assert first.result == ""


def test_a_sized_model_can_be_made_smaller() -> None:
    plan = plans.replace(Plan(), {"model.target_params": 100_000_000, "train.batch_size": 1})
    budget = card(GIB, "cpu")
    assert any("model.target_params" in r.changes for r in remedies(plan, budget))


@pytest.mark.parametrize(
    ("backend", "gib", "objective", "together"),
    [
        *((backend, gib, "next-token", 1) for backend in ("torch", "jax") for gib in (6, 8, 24)),
        ("torch", 8, "dpo", 2),
    ],
)
def test_the_largest_batch_fits_and_more_rows_do_not(
    backend: str, gib: int, objective: str, together: int
) -> None:
    plan = plans.replace(PLAN, {"backend": backend, "train.objective": objective})
    budget = card(gib * GIB)
    found = largest_micro_batch(plan, budget)
    assert found is not None
    assert found.size % together == 0
    for more, fits in ((0, True), (together, False)):
        changed = plans.replace(plan, {"train.batch_size": found.size + more})
        assert (table_of(changed, budget).verdict is Verdict.FITS) == fits


def test_the_largest_sequence_fits_and_the_next_does_not_or_has_no_positions() -> None:
    budget = card(8 * GIB)
    found = largest_sequence_length(PLAN, budget)
    assert found is not None
    length = found.size
    assert length % 8 == 0
    for more, fits in ((0, True), (8, False)):
        changed = plans.replace(PLAN, {"data.sequence_length": length + more})
        assert (table_of(changed, budget).verdict is Verdict.FITS) == fits
    roomy = msgspec.structs.replace(budget, usable_bytes=4096 * GIB)
    short = plans.replace(PLAN, {"train.batch_size": 1})
    longest = largest_sequence_length(short, roomy)
    assert longest is not None
    assert longest.size == model_of(short).max_positions
    assert (longest.all_positions, found.all_positions) == (True, False)


def test_where_not_even_one_row_fits_there_is_no_largest_batch() -> None:
    assert largest_micro_batch(PLAN, card(GIB // 2)) is None
    assert largest_sequence_length(PLAN, card(GIB // 2)) is None
