"""Sources that are mixed, and sources to validate on: what a plan may name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from memconsole.cli.plans.sources import source_lines
from memconsole.memory.state.data import dataset_tokens, training_tokens
from memconsole.plan import catalog
from memconsole.plan.check import check
from memconsole.plan.data.mixture import parts, validation_plan
from memconsole.plan.plan import Plan, PlanError, replace
from memconsole.tui.plan.widgets.plan_summary import summary_lines
from memconsole.tui.views.plan_view import PlanView


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, words in (("a", 400), ("b", 200), ("c", 100)):
        (tmp_path / f"{name}.txt").write_text("some words of text " * words)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": "some words"}) + "\n")
    return tmp_path


def plan(source: Path | str, **changes: Any) -> Plan:
    named = {f"data.{key}": None if value is None else str(value) for key, value in changes.items()}
    return replace(Plan(), {"data.source": str(source), **named})


def test_the_source_has_the_share_that_others_leave(folder: Path) -> None:
    a, b, c = (folder / f"{name}.txt" for name in "abc")
    found = parts(plan(a, mix=f"{b}=0.25, {c} = 0.125"))
    assert [part.share for part in found] == [0.625, 0.25, 0.125]
    assert [part.plan.data.source for part in found] == [str(a), str(b), str(c)]
    assert all(part.plan.data.mix is None for part in found)
    (alone,) = parts(plan(a))
    assert alone.share == 1.0


@pytest.mark.parametrize(
    ("mix", "reason"),
    [
        ("b.txt", "expected SOURCE=SHARE"),
        ("b.txt=1.5", "a share between 0 and 1"),
        ("b.txt=0", "a share between 0 and 1"),
        ("b.txt=nan", "a share between 0 and 1"),
        ("=0.5", "expected SOURCE=SHARE"),
        ("b.txt=0.6, c.txt=0.4", "leaves nothing for data.source"),
        ("b.txt=0.2, b.txt=0.2", '"b.txt" is mixed with itself'),
        ("a.txt=0.2", '"a.txt" is mixed with itself'),
        ("missing.txt=0.2", '^data.mix = "missing.txt": no such file'),
    ],
)
def test_a_mixture_that_cannot_be_is_one_line(
    mix: str, reason: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    with pytest.raises(PlanError, match=reason) as refused:
        check(plan("a.txt", mix=mix))
    assert "\n" not in str(refused.value)


def test_validation_may_not_be_part_of_what_is_trained_on(folder: Path) -> None:
    a, b = folder / "a.txt", folder / "b.txt"
    check(plan(a, validation=b))
    check(plan(a, mix=f"{b}=0.5", validation=folder / "c.txt"))
    (folder / "rows.jsonl").unlink()
    link = folder / "link.txt"
    link.symlink_to(a)
    for source, changes in (
        (a, {"validation": a}),
        (a, {"validation": link}),
        (folder, {"validation": b}),
        (a, {"validation": folder}),
        (a, {"mix": f"{b}=0.5", "validation": b}),
        ("hf://owner/name", {"validation": "train"}),
        ("hf://owner/name", {"validation": "hf://owner/name"}),
    ):
        with pytest.raises(PlanError, match=r"is part of data\.source"):
            check(plan(source, **changes))
    with pytest.raises(PlanError, match=r"data\.validation = .*no such file"):
        check(plan(a, validation=folder / "missing.txt"))


def test_a_word_is_a_split_of_a_hub_source_and_a_path_of_others(folder: Path) -> None:
    found = validation_plan(plan("hf://owner/name", validation="validation[:10%]"))
    assert found is not None
    assert (found.data.source, found.data.split) == ("hf://owner/name", "validation[:10%]")
    found = validation_plan(plan("hf://owner/name", validation=folder / "b.txt"))
    assert found is not None
    assert (found.data.source, found.data.split) == (str(folder / "b.txt"), "train")
    assert found.data.validation_fraction == 0.0
    check(plan("hf://owner/name", validation="validation"))


def test_records_are_mixed_with_records_and_tasks_without_text_have_one_source(
    folder: Path,
) -> None:
    rows, other = folder / "rows.jsonl", folder / "other.jsonl"
    other.write_text(json.dumps({"words": "of another name"}) + "\n")
    with pytest.raises(PlanError, match="holds no records"):
        check(plan(rows, template="{{ text }}", mix=f"{folder / 'a.txt'}=0.5"))
    with pytest.raises(PlanError, match=r"has no field|lacks"):
        check(plan(rows, template="{{ text }}", validation=other))
    lqr = replace(Plan(), {"model.name": "lqr", "data.source": "lqr", "data.sequence_length": 32})
    for key in ("data.mix", "data.validation"):
        with pytest.raises(PlanError, match=f"{key} = .*is for text"):
            check(replace(lqr, {key: "x.h5=0.5"}))


def test_plan_tells_shares_and_validation(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    assert source_lines(plan("a.txt")) == []
    found = source_lines(plan("a.txt", mix="b.txt=0.25", validation="c.txt"))
    assert found == ["data 75.0% a.txt, 25.0% b.txt; validated on c.txt"]
    mixed = plan(folder / "a.txt", mix=f"{folder / 'b.txt'}=0.25", validation=folder / "c.txt")
    view = PlanView(mixed)
    row = "".join(span.text for span in summary_lines(view, 200, 7)[1])
    assert "a.txt 75% + 1 more" in row
    other = catalog.choose(mixed, "data.source", str(folder / "c.txt"))
    assert (other.data.mix, other.data.validation) == (None, None)


def test_a_mixture_is_priced_as_a_pass_over_its_source(folder: Path) -> None:
    a, b = folder / "a.txt", folder / "b.txt"
    alone, other = plan(a, validation=folder / "c.txt"), plan(b)
    mixed = replace(alone, {"data.mix": f"{b}=0.2"})
    whole = training_tokens(alone)
    assert whole is not None
    assert training_tokens(mixed) == pytest.approx(whole / 0.8, rel=0.05)
    assert dataset_tokens(mixed) == (dataset_tokens(alone) or 0) + (dataset_tokens(other) or 0)
    fraction = plan(a)
    assert (training_tokens(fraction) or 0) < whole
