"""Preferences: the layouts of their records, and plans that cannot learn them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from memconsole.devices.budget import budget
from memconsole.inspection import data_settings
from memconsole.memory.estimate import estimate
from memconsole.plan.check import check, check_start
from memconsole.plan.plan import Plan, PlanError, replace
from memconsole.plan.templates.chat import RecordError
from memconsole.plan.templates.choice import template_of
from memconsole.plan.templates.preference import Pair, answered
from memconsole.plan.toggles.micro_batches import half, searched_steps
from memconsole.plan.toggles.optimizations import BY_KEY
from memconsole.plan.training.resuming import with_rows_of
from memconsole.runs.read.life.ladder import next_rung

ASKED = [{"role": "user", "content": "Where?"}]
YES, NO = ({"role": "assistant", "content": text} for text in ("Here.", "No."))
PAIR = {"prompt": "Where?", "chosen": "Here.", "rejected": "No."}


@pytest.fixture
def pairs(tmp_path: Path) -> str:
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps(PAIR) + "\n")
    return str(path)


def plan(pairs: str = "pairs.jsonl", **changes: Any) -> Plan:
    settings = {
        "data.source": pairs,
        "data.template": "chatml",
        "train.objective": "dpo",
        "train.batch_size": 4,
        "device.name": "cpu",
    }
    return replace(Plan(), settings | {k.replace("__", "."): v for k, v in changes.items()})


def rendered(record: dict[str, Any], template: str = "chatml") -> Pair:
    found = template_of(plan(data__template=template))
    assert found is not None
    pair = found.render(record)
    assert isinstance(pair, Pair)
    return pair


@pytest.mark.parametrize(
    "record",
    [
        PAIR,
        {"prompt": ASKED, "chosen": [YES], "rejected": [NO]},
        {"prompt": "Where?", "chosen": [YES], "rejected": [NO]},
        {"chosen": [*ASKED, YES], "rejected": [*ASKED, NO]},
        {"prompt": "Where?", "chosen": [*ASKED, YES], "rejected": [*ASKED, NO], "score_chosen": 8},
        {"chosen": json.dumps([*ASKED, YES]), "rejected": json.dumps([*ASKED, NO])},
        {**PAIR, "prompt": json.dumps(ASKED)},
        {**PAIR, "messages": [*ASKED, YES]},
    ],
    ids=[
        "text",
        "messages",
        "mixed",
        "whole chats",
        "prompt told twice",
        "JSON text",
        "JSON prompt",
        "chat beside it",
    ],
)
def test_every_layout_gives_the_same_pair(record: dict[str, Any]) -> None:
    pair = rendered(record)
    asked = "<|im_start|>user\nWhere?<|im_end|>\n<|im_start|>assistant\n"
    assert pair.chosen == f"{asked}Here.<|im_end|>\n"
    assert pair.rejected == f"{asked}No.<|im_end|>\n"
    for answer, words in ((pair.chosen, "Here."), (pair.rejected, "No.")):
        ((first, last),) = answer.answers
        assert answer[first:last].startswith(words)
        assert "Where" not in answer[first:last], "the prompt is not learned"


@pytest.mark.parametrize("whole", [True, False])
def test_answers_that_both_chats_share_are_part_of_the_prompt(whole: bool) -> None:
    before = [*ASKED, {"role": "assistant", "content": "Who?"}, {"role": "user", "content": "You."}]
    record: dict[str, Any] = {"prompt": before, "chosen": [YES], "rejected": [NO]}
    if whole:
        record = {"chosen": [*before, YES], "rejected": [*before, NO]}
    pair = rendered(record)
    assert [pair.chosen[a:b] for a, b in pair.chosen.answers] == ["Here.<|im_end|>"]
    assert [pair.rejected[a:b] for a, b in pair.rejected.answers] == ["No.<|im_end|>"]


def test_an_answer_that_the_other_one_begins_with_is_learned() -> None:
    pair = rendered({**PAIR, "rejected": "Here. And there."}, "prompt")
    assert [pair.chosen[a:b] for a, b in pair.chosen.answers] == ["Here."]


def test_a_template_of_fields_writes_each_answer_as_the_completion() -> None:
    pair = rendered(PAIR, "prompt")
    assert (str(pair.chosen), str(pair.rejected)) == ("Where?Here.", "Where?No.")
    own = rendered(PAIR, "Q: {{ prompt }} A:{% generation %} {{ completion }}{% endgeneration %}")
    assert str(own.rejected) == "Q: Where? A: No."


def test_a_chat_keeps_its_system_message_and_what_its_template_asks_for() -> None:
    found = answered({**PAIR, "system": "Be brief.", "chat_template_kwargs": {"a": 1}}, "rejected")
    assert found == {
        "prompt": "Where?",
        "completion": "No.",
        "system": "Be brief.",
        "chat_template_kwargs": {"a": 1},
    }


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (
            {"prompt": "a", "completion": "b"},
            '"chosen" is missing: the record has prompt, completion',
        ),
        ({**PAIR, "rejected": None}, '"rejected" is null'),
        ({"chosen": "a", "rejected": "b"}, '"prompt" is missing'),
        ({"chosen": [YES], "rejected": [NO]}, '"prompt" is missing'),
        ({"chosen": ASKED, "rejected": [NO]}, "does not end with a message of the assistant"),
        ({**PAIR, "chosen": [3]}, r"\"chosen\[0\]\" holds a number, expected a message"),
        ({**PAIR, "prompt": [3]}, r"\"prompt\[0\]\" holds a number, expected a message"),
        ({**PAIR, "rejected": 3}, '"rejected" holds a number, expected text or a list of messages'),
        (
            {"conversations": ASKED, "chosen": YES, "rejected": NO},
            '"chosen" holds an object, expected text or a list of messages',
        ),
        (
            {"question": "Where?", "chosen": "Here.", "rejected": "No."},
            "no chat that holds it: the record has question, chosen, rejected",
        ),
    ],
)
def test_a_record_without_a_preference_is_refused(record: dict[str, Any], words: str) -> None:
    with pytest.raises(RecordError, match=words):
        rendered(record)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data__template": None}, "train.objective = dpo: needs data.template"),
        ({"train__batch_size": 3}, "train.batch_size = 3: with DPO two rows are a pair"),
        ({"train__evaluation_batch_size": 1}, "train.evaluation_batch_size = 1: with DPO"),
        ({"data__mix": "a.jsonl=0.5"}, "data.mix"),
        ({"hybrid__mode": "balanced"}, "hybrid.mode"),
        ({"data__isolate_documents": True}, "data.isolate_documents"),
        ({"data__template": "{{ prompt }}{{ completion }}"}, "the template marks no answer"),
        (
            {"model__name": "lqr", "data__template": None, "data__source": "windows.h5"},
            "train.objective",
        ),
    ],
)
def test_plans_that_cannot_learn_preferences_are_refused(
    changes: dict[str, Any], words: str, pairs: str
) -> None:
    with pytest.raises(PlanError, match=words):
        check(plan(**{"pairs": pairs, **changes}))


def test_the_row_of_hybrid_training_says_why_it_stays_off(pairs: str) -> None:
    found = estimate(plan(pairs), budget(plan(pairs), None))
    reasons = {s.reason for s in found.savings if s.key == "hybrid.mode"}
    assert reasons == {"weights are not predicted with DPO; expected off"}


def test_preferences_are_learned_from_trained_weights_unless_random_ones_are_asked_for(
    pairs: str,
) -> None:
    check(plan(pairs))
    with pytest.raises(PlanError, match=r"train --from RUN.*model.weights = random"):
        check_start(plan(pairs))
    check_start(plan(pairs, model__weights="random"))


def test_the_data_reader_is_told_that_the_records_are_pairs() -> None:
    assert "train.objective=dpo" in data_settings(plan())
    assert not any(
        "objective" in word for word in data_settings(plan(train__objective="next-token"))
    )


def test_pairs_are_never_parted() -> None:
    assert [half(rows, 2) for rows in (12, 6, 4, 2)] == [6, 2, 2, 2]
    found = plan(train__batch_size=8, train__on_out_of_memory="halve")
    assert all(8 // steps % 2 == 0 for steps in searched_steps(found))
    for key in ("train.batch_size", "train.evaluation_batch_size"):
        assert all(value is None or value % 2 == 0 for value in BY_KEY[key].values(found))
    sizes = []
    while (rung := next_rung(found, 1, "train")) is not None:
        sizes.append(rung.batch_size)
        found = replace(
            found,
            {
                "train.batch_size": rung.batch_size,
                "optimize.accumulation_steps": rung.accumulation_steps,
            },
        )
    assert sizes == [4, 2]
    assert found.effective_batch == 8


def test_a_resumed_run_on_other_devices_parts_no_pair() -> None:
    def shared(batch: int, count: int) -> tuple[int, int]:
        before = plan(train__batch_size=batch, optimize__accumulation_steps=3)
        after = replace(before, {"device.count": count, "optimize.sharding": "ddp"})
        found = with_rows_of(before, after, frozenset())
        assert found.evaluation_batch % 2 == 0
        return found.train.batch_size, found.optimize.accumulation_steps

    assert shared(4, 2) == (2, 3)
    with pytest.raises(PlanError, match="3 pairs, which 2 devices cannot share equally"):
        shared(2, 2)
