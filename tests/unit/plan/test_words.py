"""Settings are found by what people call them elsewhere."""

from __future__ import annotations

import pytest

from memconsole.cli.plans.fit_options import kept_key
from memconsole.plan.plan import SETTINGS, PlanError, parse_value
from memconsole.plan.sections.words import WORDS, known_as
from memconsole.tui.screens.pick import Choice, matching

CHOICES = [Choice(k, k, s.help, also="\n".join(known_as(k))) for k, s in SETTINGS.items()]


@pytest.mark.parametrize(
    ("typed", "key"),
    [
        ("lr", "train.learning_rate"),
        ("context", "data.sequence_length"),
        ("max length", "data.sequence_length"),
        ("max_seq_len", "data.sequence_length"),
        ("qlora", "optimize.base_storage"),
        ("quant", "optimize.base_storage"),
        ("grad accum", "optimize.accumulation_steps"),
        ("gradient_accumulation_steps", "optimize.accumulation_steps"),
        ("epochs", "train.epochs"),
        ("seed", "train.seed"),
        ("remat", "optimize.gradient_checkpointing"),
        ("Weight Decay", "train.weight_decay"),
        ("wd", "train.weight_decay"),
        ("chunked loss", "optimize.fused_loss"),
        ("dtype", "optimize.precision"),
        ("oom", "train.on_out_of_memory"),
        ("d_model", "model.hidden_size"),
        ("num layers", "model.layers"),
    ],
)
def test_the_search_finds_a_setting_by_the_words_people_use(typed: str, key: str) -> None:
    assert key in [choice.value for choice in matching(CHOICES, typed)[:2]]


@pytest.mark.parametrize(
    ("typed", "key"),
    [
        ("train.lr", "train.learning_rate"),
        ("lr", "train.learning_rate"),
        ("learning_rate", "train.learning_rate"),
        ("model.sequence_length", "data.sequence_length"),
        ("max-seq-len", "data.sequence_length"),
        ("per_device_train_batch_size", "train.batch_size"),
        ("optimize.load_in_4bit", "optimize.base_storage"),
        ("train.gradient_accumulation_steps", "optimize.accumulation_steps"),
        ("optimize.chunked_loss", "optimize.fused_loss"),
        ("optimize.optimiser", "optimize.optimizer"),
    ],
)
def test_an_unknown_key_is_answered_with_the_right_one(typed: str, key: str) -> None:
    with pytest.raises(PlanError, match=f'did you mean "{key}"') as raised:
        parse_value(typed, "1")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("typed", "keys"),
    [
        ("qlora", ("optimize.lora_rank", "optimize.base_storage")),
        ("lora", ("optimize.lora_rank", "optimize.lora_alpha", "optimize.lora_dropout")),
        ("batch", ("train.batch_size", "train.evaluation_batch_size")),
        ("checkpoint", ("train.checkpoint_every", "train.checkpoint_minutes")),
        ("name", ("model.name", "device.name")),
    ],
)
def test_a_word_for_several_settings_is_answered_with_them(
    typed: str, keys: tuple[str, ...]
) -> None:
    for key in keys:
        with pytest.raises(PlanError, match=f'did you mean .*"{key}"') as raised:
            parse_value(typed, "1")
        assert "\n" not in str(raised.value)


def test_keep_takes_the_word_that_people_use_if_it_names_one_setting() -> None:
    assert kept_key("lr") == "train.learning_rate"
    assert kept_key("batch") == "train.batch_size"
    with pytest.raises(PlanError, match=r'"optimize\.lora_rank" or "optimize\.base_storage"'):
        kept_key("qlora")


def test_words_belong_to_settings_that_exist() -> None:
    assert WORDS.keys() <= SETTINGS.keys()
