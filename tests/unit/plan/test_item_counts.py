"""A recommender has as many items as its ratings, which are counted once: at once in a small file, by the reader of the
data in a large one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from memconsole.announcing import launch_rows
from memconsole.inspection import count_items, uncounted
from memconsole.memory.answers.receipts import setup_of
from memconsole.memory.estimate import estimate, model_of
from memconsole.plan import catalog
from memconsole.plan.catalog import item_counts
from memconsole.plan.check import check
from memconsole.plan.models.recommender import Recommender
from memconsole.plan.plan import Plan, PlanError, replace
from memconsole.runs.record.run_store import create_run
from memconsole.start import check_launch, start
from memconsole.tui.plan.widgets.plan_summary import summary_lines
from memconsole.tui.views.plan_view import PlanView
from tests.unit.memory.cards import card


@pytest.fixture(autouse=True)
def _own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(item_counts, "_found", {})


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file is too large to be counted at once."""
    monkeypatch.setattr(item_counts, "SMALL_BYTES", 0)


def written(path: Path, items: int, user: str = "a") -> Path:
    """Ratings of two users: `user` met all items, the other one the first three."""
    rows = [f"{user},{item},{item}" for item in range(items)] + [f"b,{n},{n}" for n in range(3)]
    path.write_text("\n".join(["user,item,time", *rows]))
    return path


def plan(source: object, **changes: Any) -> Plan:
    settings = {key.replace("__", "."): value for key, value in changes.items()}
    own = {"data.source": str(source), "device.name": "cpu", "data.validation_fraction": 0.1}
    return replace(catalog.preset("efficientids"), {**own, **settings})


def sizes(made: Plan) -> tuple[int, int]:
    model = catalog.model(made)
    assert isinstance(model, Recommender)
    assert model == model_of(made)
    return model.items, model.clusters


def test_a_recommender_has_the_items_of_its_data(tmp_path: Path) -> None:
    path = written(tmp_path / "ratings.csv", 400)
    assert sizes(plan(path)) == (400, 20)
    assert sizes(plan(tmp_path)) == (400, 20)
    assert sizes(plan(path, model__clusters=7)) == (400, 7)
    assert sizes(plan(path, model__items=500)) == (500, 22)
    assert sizes(plan(tmp_path / "missing.csv")) == (1000, 40)
    assert sizes(plan(written(path, 1000))) == (1000, 40), "as the catalog has it"
    assert sizes(plan(written(path, 1))) == (3, 2)
    assert setup_of(plan(path)) == setup_of(catalog.with_sizes(plan(path)))


def test_a_model_with_too_few_places_for_the_items_of_its_data_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "ratings.csv", 30)
    check(plan(path, model__items=30))
    with pytest.raises(PlanError, match=r"model.items = 29: .*ratings.csv holds 30 items; exp"):
        check(plan(tmp_path, model__items=29))


def test_a_large_file_is_counted_by_the_reader_once_for_each_state_of_it(
    tmp_path: Path, large: None
) -> None:
    made = plan(written(tmp_path / "ratings.csv", 30))
    assert (sizes(made), catalog.assumed_items(made)) == ((1000, 40), 1000)
    count_items(made)
    assert (sizes(made), uncounted(made)) == ((30, 5), None)
    item_counts._found.clear()
    assert sizes(made) == (30, 5), "it is kept on disk"
    written(tmp_path / "ratings.csv", 31)
    assert uncounted(made) is not None


def test_only_the_items_of_the_first_users_count(tmp_path: Path) -> None:
    made = plan(written(tmp_path / "ratings.csv", 30, user="c"), data__max_examples=1)
    count_items(made)
    assert sizes(made) == (30, 5)
    few = plan(written(tmp_path / "ratings.csv", 30, user="9").rename(tmp_path / "a.csv"))
    few = replace(few, {"data.max_examples": 1})
    (tmp_path / "a.csv").write_text((tmp_path / "a.csv").read_text().replace("b,", "7,"))
    count_items(few)
    assert sizes(few) == (3, 2)


def test_an_assumed_number_is_told(tmp_path: Path, large: None) -> None:
    made = plan(written(tmp_path / "ratings.csv", 30))
    found = estimate(made, card(2**34))
    (note,) = found.notes
    assert note.words == "model.items: 1,000 are assumed until the data are counted"
    assert ("note", note.words) in launch_rows(made, found)
    lines = summary_lines(PlanView(made, estimate=found, stale=False), 44, 9)
    shown = " ".join(span.text.strip() for line in lines for span in line)
    assert "1,000 items assumed" in " ".join(shown.split())
    for known in (plan(tmp_path / "ratings.csv", model__items=1000), counted(made)):
        assert estimate(known, card(2**34)).notes == ()
    (note,) = estimate(plan(tmp_path / "missing.csv"), card(2**34)).notes
    assert note.words == "model.items: 1,000 are assumed without the data"


def counted(made: Plan) -> Plan:
    count_items(made)
    return made


def test_a_launch_counts_first_and_the_run_keeps_the_number(
    tmp_path: Path, large: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memconsole.start.launch", lambda made, name, **_: create_run(made, name))
    path = written(tmp_path / "ratings.csv", 30)
    run = start(plan(path), "one", None)
    written(path, 60)
    assert (sizes(run.read_plan()), run.read_plan().model.items) == ((30, 5), 30)
    other = catalog.choose(run.read_given_plan(), "data.source", str(tmp_path))
    assert sizes(counted(other)) == (60, 8)
    path.write_text(path.read_text() + "\nc,1,never\n")
    with pytest.raises(PlanError, match="the time is neither a number nor an ISO date"):
        check_launch(plan(path), None)


def test_the_size_of_a_run_does_not_depend_on_its_data(tmp_path: Path) -> None:
    """Its plan may leave the number open if it was not launched by the console."""
    run = create_run(plan(written(tmp_path / "ratings.csv", 30)))
    assert sizes(run.read_plan()) == (1000, 40)


def test_the_items_of_a_run_whose_weights_are_taken_stay(tmp_path: Path) -> None:
    made = plan("ratings", model__items=50, model__clusters=5)
    path = str(written(tmp_path / "ratings.csv", 30))
    assert sizes(catalog.choose(made, "data.source", path)) == (30, 5)
    other = replace(made, {"model.weights": "/run/checkpoints/best"})
    assert sizes(catalog.choose(other, "data.source", path)) == (50, 5)


def test_clusters_are_compared_with_items_that_are_known(tmp_path: Path, large: None) -> None:
    made = plan(written(tmp_path / "ratings.csv", 1500), model__clusters=1200)
    check(made)
    check(counted(made))
    with pytest.raises(PlanError, match=r"expected at most model\.items = 30"):
        check(counted(plan(written(tmp_path / "ratings.csv", 30), model__clusters=31)))


def test_clusters_follow_the_items_that_are_set(tmp_path: Path) -> None:
    path = written(tmp_path / "ratings.csv", 30)
    assert sizes(plan(path, model__items=1_000_000)) == (1_000_000, 1000)
    assert sizes(plan(path, model__items=35)) == (35, 6)
    assert sizes(plan(path, model__items=1000)) == (1000, 40), "as in the catalog"


def test_a_run_from_the_weights_of_another_counts_its_data_too(tmp_path: Path) -> None:
    path = written(tmp_path / "ratings.csv", 400)
    assert sizes(plan(path, model__weights=str(tmp_path))) == sizes(plan(path))
