"""Ratings: reading, clusters, the split in time, rows, and the baselines."""

from __future__ import annotations

import hashlib
import json
from datetime import date, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from memconsole.memory.seconds import peak_units_per_second
from memconsole.memory.state.data import units_per_step
from memconsole.plan import catalog
from memconsole.plan.catalog.ratings import check_ratings
from memconsole.plan.check import check
from memconsole.plan.data.made import Size
from memconsole.plan.data.rows import row_fill, training_rows
from memconsole.plan.machine.budget import Budget
from memconsole.plan.models.recommender import ITEMS_JSON, Recommender
from memconsole.plan.plan import DataChoice, Plan, PlanError, replace
from memconsole.plan.tasks.recommendation import RANKED
from memconsole_trainer.data.inspect import inspect
from memconsole_trainer.data.make.__main__ import make
from memconsole_trainer.data.make.maker import Request
from memconsole_trainer.data.ratings import baselines, numbering, reading
from memconsole_trainer.data.ratings.baselines import Baselines, ranked
from memconsole_trainer.data.ratings.clusters import balanced, from_histories
from memconsole_trainer.data.ratings.histories import Histories, HistoryRows, batch_of
from memconsole_trainer.data.ratings.metadata import Metadata, features, find_metadata
from memconsole_trainer.data.ratings.numbering import Numbering, check_room, extended, number
from memconsole_trainer.data.ratings.reading import Ratings, read_ratings
from memconsole_trainer.data.sources.documents import DataError
from memconsole_trainer.data.stream import BatchShape
from memconsole_trainer.engine import LossSum
from memconsole_trainer.tasks.recommendation import RatingData, open_data
from tests.unit.data.quiet import Quiet

OPTIONS = {"items": 60, "genres": 5, "history": 12}


def nothing() -> None:
    pass


def made(folder: Path, size: int = 1500, seed: int = 0) -> Path:
    out = folder / f"made-{size}-{seed}"
    make(Request("ratings", out, Size(size, None), seed, OPTIONS))
    return out / "ratings.dat"


def plan(**changes: Any) -> Plan:
    return replace(catalog.preset("efficientids"), {"data.sequence_length": 8, **changes})


def model(items: int = 60, clusters: int = 6) -> Recommender:
    found = catalog.model(plan(**{"model.items": items, "model.clusters": clusters}))
    assert isinstance(found, Recommender)
    return found


# reading


def test_both_layouts_are_read_the_same_sorted_by_user_and_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [(7, 30, 4, 200), (3, 10, 5, 100), (7, 20, 1, 100), (7, 10, 2, 200)]
    (tmp_path / "ratings.dat").write_text("".join(f"{u}::{i}::{r}::{t}\n" for u, i, r, t in rows))
    table = "timestamp,userId,movieId,rating\r\n" + "".join(
        f"{t},{u},{i},{r}.5\r\n" for u, i, r, t in rows
    )
    (tmp_path / "ratings.csv").write_text(table.removesuffix("\r\n"))
    for rows_at_once in (500, 1):
        monkeypatch.setattr(reading, "BLOCK_ROWS", rows_at_once)
        for name in ("ratings.dat", "ratings.csv"):
            found = read_ratings(tmp_path / name, DataChoice(), nothing)
            assert found.users.tolist() == [3, 7, 7, 7]
            assert found.items.tolist() == [10, 20, 30, 10]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.dat", "1::2::3::4\n1::2::3\n", "line 2: has 3 fields, expected 4: 1::2::3"),
        ("a.dat", "1::2::3::4\n1::2::3\n1::2::3::4::5\n", "line 2: has 3 fields"),
        ("a.dat", "1::2::3::4\n5::6::7::8\n9::1", "line 3: has 2 fields"),
        ("a.dat", "\n", "holds no ratings"),
        ("a.csv", "userId,movieId,timestamp\n", "holds no ratings"),
        ("a.csv", "userId,movieId,timestamp\n1,2,3\n\n,2,3\n", "line 4: the user is empty: ,2,3"),
        ("a.csv", "user,item,time\n1,2,3\n1,,3\n", "line 3: the item is empty"),
        ("a.csv", "user,item,time\n1,2,3\n1,2,\n", "line 3: the time is empty"),
        ("a.csv", "user,item,time\n1,2,3\n1,2,01/02/2020\n", "neither a number nor an ISO date"),
        ("a.csv", "user,item,time\n1,2,3\n1,2,nan\n", "neither a number nor an ISO date"),
        ("a.csv", 'user,item,time\n1,"a\nb",3\n1,2,x\n', "line 4: the time is neither"),
        ("a.csv", 'user,item,time\n1,"2,3\n', "line 2: unexpected end of data"),
    ],
)
def test_a_row_that_cannot_be_read_is_named_with_its_line(
    name: str, text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / name
    path.write_text(text)
    for rows in (500, 1):
        monkeypatch.setattr(reading, "BLOCK_ROWS", rows)
        with pytest.raises(DataError) as error:
            read_ratings(path, DataChoice(), nothing)
        assert str(error.value).startswith(str(path))
        assert message in str(error.value)
        assert "\n" not in str(error.value)


HEADER = "userId,movieId,rating,timestamp"


def loaded(path: Path, text: str, **settings: str) -> tuple[list[str], list[str]]:
    """The users and the items' ids in the order in which they are learned."""
    path.write_text(text, encoding="utf-8")
    data = DataChoice(**settings)
    check_ratings(path, data)
    found = read_ratings(path, data, nothing)
    return [str(user) for user in found.users.tolist()], found.ids(found.items)


@pytest.mark.parametrize(
    ("name", "text", "items"),
    [
        ("a.csv", f'{HEADER}\n"1","20","3","5"\n"1","10","3","4"\n', "10 20"),
        ("a.csv", 'userId,title,movieId,time\n1,"A, B",20,5\n1,C,10,4\n', "10 20"),
        ("a.csv", f"{HEADER}\n1,20,3,1000001.0\n1,10,3,1000000.0\n", "10 20"),
        ("a.csv", f"{HEADER}\n1,20,3,2020-01-02\n1,10,3,2020-01-01T23:59:59Z\n", "10 20"),
        ("a.csv", f"{HEADER}\n1,20,3,2020-01-02 00:00:01\n1,10,3,2020-01-02\n", "10 20"),
        ("a.csv", f"{HEADER}\n1,20,,5\n1,10,,4\n", "10 20"),
        ("a.csv", f"{HEADER}\n1,20,3,5\n\n1,10,3,4\n\n", "10 20"),
        ("a.csv", "customer;product;date\n1;20;5\n1;10;4\n", "10 20"),
        ("a.csv", "user_id,item_id\n1,20\n1,10\n", "20 10"),
        ("a.csv", f"{HEADER}\n1,b,3,5\n1,a,3,4\n1,b,3,6\n", "a b b"),
        ("a.csv", f"{HEADER}\n1,Käse,3,5\n1,茶,3,4\n", "茶 Käse"),
        ("a.csv", "1,x20,3.0,5\n1,x10,2.0,4\n", "x10 x20"),
        ("a.tsv", "user\titem\ttime\n1\t20\t5\n1\t10\t4\n", "10 20"),
        ("u.data", "1\t20\t3\t5\n1\t10\t1\t4\n", "10 20"),
        ("a.inter", "user_id:token\titem_id:token\ttimestamp:float\n1\t20\t5\n1\t10\t4\n", "10 20"),
        ("a.dat", "1::it em::3::5\n1::b::x::4\n", "b,it em"),
    ],
    ids=("quotes", "comma", "float times", "dates", "moments", "no rating", "blank", "semicolon", "no time", "strings", "unicode", "no header", "tsv", "u.data", "recbole", "dat"),
)  # fmt: skip
def test_tables_of_people_are_read(name: str, text: str, items: str, tmp_path: Path) -> None:
    users, found = loaded(tmp_path / name, text)
    assert found == items.split("," if "," in items else None)
    assert set(users) == {"1"}


def test_ids_that_are_not_all_whole_numbers_are_numbered_as_they_appear(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("user,item,time\nzoe,7,1\nann,x,1\nzoe,07,2\n")
    found = read_ratings(path, DataChoice(), nothing)
    assert found.users.tolist() == [0, 0, 1]
    assert found.items.tolist() == [0, 2, 1]
    assert found.item_names == ("7", "x", "07")
    path.write_text("user,item,time\n9,7,1\n3,+7,1\n")
    found = read_ratings(path, DataChoice(), nothing)
    assert (found.users.tolist(), found.items.tolist()) == ([3, 9], [7, 7])
    assert found.item_names is None


def test_settings_name_the_columns_and_an_error_lists_those_of_the_file(tmp_path: Path) -> None:
    path, text = tmp_path / "a.csv", "Kunde,Artikel,wann,item\n1,20,5,3\n1,10,4,3\n"
    named = {"user_column": "Kunde", "item_column": "Artikel", "time_column": "wann"}
    assert loaded(path, text, **named)[1] == ["10", "20"]
    assert loaded(path, text, user_column="Kunde")[1] == ["3", "3"]
    with pytest.raises(
        PlanError, match=r"no column of users; set data\.user_column to one of: Kunde, Artikel"
    ):
        loaded(path, text)
    for column, key in (("Kunden", "user_column"), ("x", "item_column"), ("y", "time_column")):
        with pytest.raises(PlanError) as error:
            loaded(path, text, **{**named, key: column})
        assert error.value.key == f"data.{key}"
        assert str(error.value).endswith("its columns are: Kunde, Artikel, wann, item")


def test_parquet_is_read_as_a_table_of_the_same_texts(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    path, moment = tmp_path / "a.parquet", datetime(2020, 1, 1, 12, 30)
    times = {
        "numbers": [5, 4], "floats": [5.5, 4.0], "texts": ["2020-01-02", "2020-01-01"],
        "moments": [moment, moment - timedelta(microseconds=1)],
        "dates": [date(2020, 1, 2), date(2020, 1, 1)],
    }  # fmt: skip
    for values in times.values():
        pq.write_table(pa.table({"user": [3, 3], "item": ["b", "a"], "time": values}), path)
        found = read_ratings(path, DataChoice(), nothing)
        assert found.users.tolist() == [3, 3]
        assert found.ids(found.items) == ["a", "b"]
        assert found.fingerprint == hashlib.sha256(path.read_bytes()).hexdigest()
    pq.write_table(pa.table({"user": [3, None], "item": [1, 2]}), path)
    with pytest.raises(DataError, match="row 2: the user is empty"):
        read_ratings(path, DataChoice(), nothing)
    path.write_bytes(b"PAR1, but not really")
    with pytest.raises(DataError, match=r"a\.parquet: cannot be read as parquet"):
        read_ratings(path, DataChoice(), nothing)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("user,item,time\n1,2,soon\n", "line 2: the time is neither a number nor an ISO date"),
        ("user,thing\n1,2\n", "no column of items; set data.item_column to one of: user, thing"),
        ("user,item\n", "holds no ratings"),
    ],
)
def test_a_plan_refuses_what_the_trainer_would_refuse(
    text: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "ratings.csv"
    path.write_text(text)
    asked = plan(**{"data.source": str(path)})
    with pytest.raises(PlanError, match=message):
        check(asked)
    found = inspect(asked)
    assert found.kind == "unusable"
    assert message in found.problem


def test_a_run_stores_the_names_of_items_and_finds_them_in_another_order(tmp_path: Path) -> None:
    lines = [f"u{n % 7},item {n % 5},{n}" for n in range(60)]
    path = tmp_path / "ratings.csv"
    path.write_text("\n".join(["user,item,time", *lines]))
    first = read_ratings(path, DataChoice(), nothing)
    stored = msgspec.json.encode(number(first, None, model(10, 2), 0.1, nothing))
    numbering = msgspec.json.decode(stored, type=Numbering)
    assert sorted(filter(None, numbering.names)) == [f"item {n}" for n in range(5)]
    for ratings in (first, again(path, lines[::-1])):
        items = numbering.items_of(ratings)
        assert [numbering.names[item - 1] for item in items] == ratings.ids(ratings.items)
    assert numbering.unknown(again(path, [*lines, "u1,new,99"])) == ["new"]
    more = extended(numbering, path, again(path, [*lines[::-1], "u1,new,99"]), model(10, 2))
    assert [name for name in more.names if name not in numbering.names] == ["new"]
    pairs = zip(more.names, numbering.names, strict=True)
    assert all(new == old for new, old in pairs if old), "old items keep their places"


@pytest.mark.parametrize("odd", ["B00X", "0001055178", "9" * 5000])
def test_an_id_is_the_same_whatever_stands_beside_it(odd: str, tmp_path: Path) -> None:
    """Leading zeros stay, and digits that are no 64-bit number are text."""
    path = tmp_path / "ratings.csv"
    found = again(path, ["u,0001055178,1", f"u,{odd},2", "007,0001055178,3"])
    assert set(found.ids(found.items)) == {"0001055178", odd}
    assert {found.user_id(int(user)) for user in found.users} == {"u", "007"}
    alone = again(path, ["u,0001055178,1", "u,0001055178,2"])
    assert set(alone.ids(alone.items)) == {"0001055178"}


def again(path: Path, lines: list[str]) -> Ratings:
    path.write_text("\n".join(["user,item,time", *lines]))
    return read_ratings(path, DataChoice(), nothing)


def test_rows_that_repeat_another_are_left_out_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "ratings.csv"
    lines = ["a,1,5,10", "a,2,5,11", "a,1,5,10", "a,1,5,10", "a,2,3,11", "a,1,5,12"]
    path.write_text("\n".join(["user,item,stars,time", *lines]))
    found = read_ratings(path, DataChoice(), nothing)
    assert found.items.tolist() == [1, 2, 2, 1], "other stars and other times are other rows"
    assert found.warning == "2 rows are the same as an earlier one and are left out"
    shown = inspect(plan(**{"data.source": str(path)}))
    assert (shown.documents, shown.warning) == (4, found.warning)
    path.write_text("\n".join(["user,item", "a,1", "a,2", "a,1", "a,1"]))
    found = read_ratings(path, DataChoice(), nothing)
    assert (found.items.tolist(), found.repeated) == ([1, 2, 1, 1], 0), "the order is the time"


def test_rows_of_parquet_that_repeat_another_are_left_out(tmp_path: Path) -> None:
    pyarrow, parquet = map(pytest.importorskip, ("pyarrow", "pyarrow.parquet"))
    rows = {"user": [1, 1, 1], "item": [5, 5, 5], "time": [1, 1, 1], "order": ["x", "x", "y"]}
    parquet.write_table(pyarrow.table(rows), tmp_path / "a.parquet")
    found = read_ratings(tmp_path / "a.parquet", DataChoice(), nothing)
    assert (found.items.tolist(), found.repeated) == ([5, 5], 1)


def test_a_run_tells_how_many_rows_repeat_another(tmp_path: Path) -> None:
    path = tmp_path / "ratings.csv"
    rows = [f"{user},{item},{item}" for user in "ab" for item in range(5) for _ in range(2)]
    path.write_text("\n".join(["user,item,time", *rows]))
    told: list[str] = []

    class Listening(Quiet):
        def warning(self, message: str) -> None:
            told.append(message)

    asked = plan(**{"data.source": str(path), "model.items": 10, "model.clusters": 2})
    open_data(asked, catalog.model(asked), tmp_path, Listening(), {})
    assert f"{path}: 10 rows are the same as an earlier one and are left out" in told


def test_metadata_describe_items_whose_ids_are_words(tmp_path: Path) -> None:
    (tmp_path / "items.csv").write_text("id,title,genres\nx1,Tea,Drink|Hot\nx2,Cake,Food\n")
    found = metadata_beside(tmp_path / "ratings.csv")
    assert found is not None
    assert np.square(features(found, ["x1", "x2", "x3"])).sum(1).tolist() == pytest.approx(
        [1, 1, 0]
    )


def test_metadata_of_both_layouts_gives_the_same_features(tmp_path: Path) -> None:
    (tmp_path / "movies.dat").write_bytes(
        "1::Caf\xe9 River (1999)::Drama|Crime\n2::River Stone (2000)::Drama\n".encode("latin-1")
    )
    found = metadata_beside(tmp_path / "ratings.dat")
    assert found is not None
    dat = features(found, ["1", "2", "9"])
    (tmp_path / "movies.dat").unlink()
    (tmp_path / "movies.csv").write_text(
        'movieId,title,genres\n1,"Café River, (1999)",Drama|Crime\n2,River Stone (2000),Drama\n'
    )
    found = metadata_beside(tmp_path / "ratings.csv")
    assert found is not None
    np.testing.assert_array_equal(features(found, ["1", "2", "9"]), dat)
    assert np.square(dat).sum(1).tolist() == pytest.approx([1, 1, 0])


def test_an_index_without_a_name_is_no_item(tmp_path: Path) -> None:
    """As pandas writes a table."""
    (tmp_path / "movies.csv").write_text(",movieId,title,genres\n0,10,Ten,Drama\n1,20,Two,Crime\n")
    found = metadata_beside(tmp_path / "ratings.csv")
    assert found is not None
    assert [*found.items] == ["10", "20"]


def metadata_beside(path: Path, told: list[str] | None = None, **columns: str) -> Metadata | None:
    warned: list[str] = []
    found = find_metadata(path, DataChoice(**columns), warned.append)
    if told is None:
        assert not warned
    else:
        told += warned
    return found


@pytest.mark.parametrize(
    ("table", "why"),
    [
        ("id,price\nx1,3\n", "expected columns of ids, and titles or genres; its columns are: id, price"),
        ("sku,price,weight\nx1,3,4\n", "its columns are: sku, price, weight"),
        ("id,title,genres\nx1,Tea,Hot\nx2,Cake\n", "line 3: expected item, title and genres: x2, Cake"),
        ("", "expected columns of ids"),
    ],
)  # fmt: skip
def test_a_table_that_does_not_describe_items_is_left_out(
    table: str, why: str, tmp_path: Path
) -> None:
    (tmp_path / "items.csv").write_text(table)
    told: list[str] = []
    assert metadata_beside(tmp_path / "ratings.csv", told) is None
    (words,) = told
    assert why in words
    assert words.endswith("; items are clustered by the items near them in histories")


def test_a_run_with_an_unrelated_table_beside_its_ratings_clusters_by_histories(
    tmp_path: Path,
) -> None:
    file = made(tmp_path)
    (file.parent / "movies.dat").unlink()
    without = opened(file, tmp_path / "a")
    (file.parent / "items.csv").write_text("id,price\n1,3\n")
    assert opened(file, tmp_path / "b").fingerprints == without.fingerprints


@pytest.mark.parametrize(
    ("table", "columns"),
    [
        ("genres,id,title\nHot|Drink,x1,Tea\n", {}),
        ("id;price;category;name\nx1;3;Hot|Drink;Tea\n", {}),
        ("Artikel,title,genres\nx1,Tea,Hot|Drink\n", {"item_column": "Artikel"}),
    ],
)
def test_columns_of_metadata_are_found_by_name(
    table: str, columns: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "items.csv").write_text(table)
    found = metadata_beside(tmp_path / "ratings.csv", **columns)
    assert found is not None
    assert found.items == {"x1": ("Tea", ("Hot", "Drink"))}


def test_metadata_without_a_header_are_item_title_and_genres(tmp_path: Path) -> None:
    (tmp_path / "movies.csv").write_text("1,Tea,Hot|Drink\n")
    found = metadata_beside(tmp_path / "ratings.csv")
    assert found is not None
    assert found.items == {"1": ("Tea", ("Hot", "Drink"))}


# clusters


def test_clusters_are_full_and_find_the_groups_that_are_there() -> None:
    draw = np.random.default_rng(0)
    centres = draw.normal(size=(4, 8)) * 5
    group = draw.permutation(np.arange(40) % 4)
    rows = (centres[group] + draw.normal(size=(40, 8)) * 0.1).astype(np.float32)
    found = balanced(rows, np.full(4, 10), 0, nothing)
    assert len(set(zip(group.tolist(), found.tolist(), strict=True))) == 4
    tight = balanced(rows, np.array([10, 10, 10, 11]), 0, nothing)
    assert np.bincount(tight).max() <= 11
    np.testing.assert_array_equal(found, balanced(rows, np.full(4, 10), 0, nothing))


def test_without_metadata_items_met_together_are_alike() -> None:
    draw = np.random.default_rng(0)
    users = np.repeat(np.arange(200), 10)
    half = np.repeat(draw.integers(2, size=200), 10)
    items = half * 10 + draw.integers(10, size=2000)
    rows = from_histories(items, users, 20, 0)
    found = balanced(rows, np.array([10, 10]), 0, nothing)
    assert set(found[:10]) != set(found[10:])
    assert len(set(found[:10])) == len(set(found[10:])) == 1


def test_items_are_numbered_by_cluster_and_found_again(tmp_path: Path) -> None:
    path = made(tmp_path)
    ratings = read_ratings(path, DataChoice(), nothing)
    six = model()
    for metadata in (metadata_beside(path), None):
        found = number(ratings, metadata, six, 0.05, nothing)
        items = found.items_of(ratings)
        own = np.array(found.numbers)
        np.testing.assert_array_equal(own[items - 1], ratings.items)
        assert found.unknown(ratings) == []
        assert found.unknown(Ratings(np.zeros(2), np.array([3, 999]), "")) == ["999"]
        assert sorted(own[own >= 0]) == sorted(set(ratings.items.tolist()))
        assert found == number(ratings, metadata, six, 0.05, nothing)
    with pytest.raises(PlanError, match=r"holds \d+ items, the model 20; set model\.items = "):
        check_room(path, ratings, model(20, 2))


def opened_from(run: Path, source: Path, directory: Path, **changes: int) -> list[int]:
    """The numbering of a run in `directory` that starts from the weights of `run`."""
    directory.mkdir()
    sizes = {f"model.{key}": value for key, value in changes.items()}
    asked = plan(**{"model.weights": str(run / "checkpoints" / "step-000000001")})
    asked = replace(asked, {"data.source": str(source), **sizes})
    open_data(asked, catalog.model(asked), directory, Quiet(), {})
    kept: list[int] = json.loads((directory / ITEMS_JSON).read_bytes())["numbers"]
    return kept


def test_a_run_from_the_weights_of_another_keeps_its_items_in_their_places(tmp_path: Path) -> None:
    path, grown, sizes = made(tmp_path), tmp_path / "ratings.dat", {"items": 62, "clusters": 6}
    first = plan(**{"data.source": str(path), "model.items": 62, "model.clusters": 6})
    run = tmp_path / "run"
    run.mkdir()
    open_data(first, catalog.model(first), run, Quiet(), {})
    before = json.loads((run / ITEMS_JSON).read_bytes())["numbers"]
    own = set(before) - {-1}
    new = list(range(900, 962 - len(own)))
    text = path.read_text()
    grown.write_text(text + "".join(f"1::{item}::5::{2 * 10**9 + item}\n" for item in new))
    after = opened_from(run, grown, tmp_path / "grown", **sizes)
    assert [item for item, old in zip(after, before, strict=True) if old < 0 <= item] == new
    assert all(item == old for item, old in zip(after, before, strict=True) if old >= 0)
    places = {place + 1 for place, item in enumerate(after) if item >= 0}
    assert places == set(numbering.places(model(**sizes)).tolist())
    assert opened_from(run, path, tmp_path / "same", **sizes) == before
    with pytest.raises(PlanError, match=r"in 7 clusters: .* in other places"):
        opened_from(run, path, tmp_path / "other", items=62, clusters=7)
    grown.write_text(grown.read_text() + "1::999::5::2000000999\n")
    full = (
        rf"{len(new) + 1} items .* {len(new)} free places; train new weights with model\.items = 63"
    )
    with pytest.raises(PlanError, match=full):
        opened_from(run, grown, tmp_path / "full", **sizes)
    (run / ITEMS_JSON).unlink()
    with pytest.raises(DataError, match=r"the items of its table cannot be read from .*: No such"):
        opened_from(run, path, tmp_path / "gone", **sizes)


# histories


def histories(fraction: float = 0.2) -> tuple[Histories, list[list[int]]]:
    draw = np.random.default_rng(0)
    people = [draw.integers(1, 61, size=n).tolist() for n in (1, 2, 3, 9, 25, 40)]
    users = np.repeat(np.arange(6) * 3, [len(p) for p in people])
    return Histories(users, np.concatenate(people).astype(np.int32), fraction), people


def test_the_last_items_of_each_user_are_held_out_and_the_others_are_targets_once() -> None:
    found, people = histories()
    held = [0, 0, 1, 2, 5, 8]
    assert found.held_out == sum(held)
    rows = HistoryRows(plan(), found)
    seen: list[int] = []
    for begin, end in rows.bounds:
        assert 2 <= end - begin <= 9
        seen += range(begin + 1, end)
    starts = np.cumsum([0, *map(len, people)])
    wanted = [
        place
        for start, person, last in zip(starts, people, held, strict=False)
        for place in range(start + 1, start + len(person) - last)
    ]
    assert sorted(seen) == wanted
    assert histories(0.0)[0].held_out == 0
    assert not len(histories(0.0)[0].held_rows(8))


@pytest.mark.parametrize("length", [1, 2, 8, 9, 100])
def test_every_held_out_item_is_evaluated_once_after_enough_context(length: int) -> None:
    sizes = (1, 3, 40, 700, 5)
    users = np.repeat(np.arange(len(sizes)), sizes)
    found = Histories(users, np.ones(sum(sizes), np.int32), 0.2)
    rows = found.held_rows(length)
    assert (rows[:, 2] - rows[:, 0]).max() <= length + 1
    targets = [at for _, first, end in rows for at in range(first, end)]
    spans = zip(found.train_ends, found.ends, strict=True)
    assert targets == [at for train_end, end in spans for at in range(train_end, end)]
    assert len(targets) == found.held_out == 0 + 1 + 8 + 140 + 1
    for begin, first, _ in rows:
        start = found.starts[users[begin]]
        assert users[begin] == users[first]
        assert first - begin >= min(max(1, length // 2), first - start)


def test_rows_are_shuffled_each_epoch_and_go_on_exactly_where_they_stopped() -> None:
    rows = HistoryRows(plan(), histories()[0])
    whole = [row.tolist() for row in rows.epoch(1)]
    order = rows.epoch(1)
    for _ in range(4):
        next(order)
    again = rows.epoch(1)
    again.set_state(order.get_state())
    assert [row.tolist() for row in again] == whole[4:]
    other = [row.tolist() for row in rows.epoch(2)]
    assert other != whole
    assert sorted(other) == sorted(whole)


def test_a_long_table_in_order_of_time_does_not_tell_how_many_rows_it_gives(tmp_path: Path) -> None:
    lines = [f"{user}::{item}::5::{item}" for user in range(200) for item in range(200)]
    path = tmp_path / "ratings.dat"
    for read, known in (
        (lines, True),
        (sorted(lines, key=lambda line: line.split("::")[1]), False),
    ):
        path.write_text("\n".join(read))
        wanted = plan(**{"data.source": str(path)})
        assert (training_rows(wanted, catalog.model(wanted)) is not None) is known


@pytest.mark.parametrize("length", [8, 16, 40])
def test_a_plan_expects_the_interactions_that_rows_hold_besides_padding(
    length: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    changes = {"data.source": str(made(tmp_path)), "data.sequence_length": length}
    wanted = plan(**changes, **{"train.batch_size": 16, "optimize.accumulation_steps": 1})
    found = read_ratings(Path(wanted.data.source), DataChoice(), nothing)
    kept = Histories(found.users, found.items, wanted.data.validation_fraction)
    rows = HistoryRows(wanted, kept)
    held = int(np.diff(rows.bounds, axis=1).sum()) - len(rows.bounds)
    shape = catalog.model(wanted)
    assert training_rows(wanted, shape) == len(rows.bounds)
    assert row_fill(wanted, shape) == pytest.approx(held / (len(rows.bounds) * length))
    assert units_per_step(wanted, shape) / 16 == pytest.approx(held / len(rows.bounds), abs=0.5)
    none = replace(wanted, {"data.source": str(tmp_path / "none.dat")})
    assert units_per_step(none, shape) == 16 * length
    budget = Budget(
        name="cpu", kind="cpu", memory_label="host RAM", total_bytes=1, usable_bytes=1, why="",
        peak_flops={"fp32": 1e12},
    )  # fmt: skip
    ratio = units_per_step(wanted, shape) / units_per_step(none, shape)
    peak = peak_units_per_second(wanted, shape, budget)
    assert peak == pytest.approx(ratio * peak_units_per_second(none, shape, budget))


def test_a_batch_is_padded_with_item_0_which_counts_nothing() -> None:
    row = np.array([5, 6, 7, 8], np.int32)
    found = batch_of([(row, 1), (row, 3)], BatchShape(1, 3, 5))
    assert found["items"][0].tolist() == [[5, 6, 7, 0, 0], [5, 6, 7, 0, 0], [0] * 5]
    assert found["targets"][0].tolist() == [[6, 7, 8, 0, 0], [0, 0, 8, 0, 0], [0] * 5]
    assert found.weight == 4


# baselines


def measures(ranks: list[tuple[int, int]]) -> dict[str, float]:
    """The measures of items that rank anywhere from the first to the last of two ranks, each rank as likely."""
    gains = {"recall": lambda r: 1, "mrr": lambda r: 1 / r, "ndcg": lambda r: 1 / np.log2(r + 1)}
    return {
        f"{name}_at_{k}": np.mean(
            [
                np.mean([gain(r) if r <= k else 0 for r in range(first, last + 1)])
                for first, last in ranks
            ]
        )
        for name, gain in gains.items()
        for k in (1, 5, 10)
    }


def of_scores(scores: Any, target: int) -> tuple[int, int]:
    above = int((scores > scores[target]).sum())
    return above + 1, above + int((scores == scores[target]).sum())


def test_the_baselines_are_those_of_their_definitions() -> None:
    found, people = histories()
    places = np.arange(1, 61)
    told = Baselines(found, 61, places).measured(found.held_rows(8), nothing)
    held = [0, 0, 1, 2, 5, 8]
    trained = [p[: len(p) - h] for p, h in zip(people, held, strict=True)]
    counts = np.array([sum(p.count(i) for p in trained) for i in range(61)])
    sets = [{u for u, p in enumerate(trained) if i in p} for i in range(61)]
    popular, near, nats = [], [], []
    for person, last in zip(people, held, strict=True):
        for at in range(len(person) - last, len(person)):
            target = person[at]
            popular.append(of_scores(counts[1:], target - 1))
            nats.append(-np.log((counts[target] + 1) / (counts[1:] + 1).sum()))
            scores = counts / (1 + counts.max()) * 1e-6
            for age, item in enumerate(person[max(0, at - 10) : at][::-1], start=1):
                for other in range(61):
                    both = len(sets[item] & sets[other])
                    if both and other != item:
                        likeness = both / np.sqrt(len(sets[item]) * len(sets[other]))
                        scores[other] += np.float32(likeness) / age
            near.append(of_scores(scores[1:], target - 1))
    assert told.pop("popularity_loss") == pytest.approx(np.mean(nats))
    for name, ranks in (("popularity", popular), ("knn", near)):
        for key, value in measures(ranks).items():
            assert told.pop(f"{name}_{key}") == pytest.approx(value)
    assert not told


def test_items_that_all_are_as_popular_share_their_ranks() -> None:
    """A hundred items in a ring: chance is a Recall@10 of 0.1."""
    users, times = np.repeat(np.arange(100), 11), np.tile(np.arange(11), 100)
    found = Histories(users, ((users + times) % 100 + 1).astype(np.int32), 0.05)
    told = Baselines(found, 101, np.arange(1, 101)).measured(found.held_rows(8), nothing)
    assert told["popularity_recall_at_10"] == pytest.approx(0.1)
    assert told["popularity_mrr_at_1"] == pytest.approx(0.01)


def large() -> tuple[Histories, int]:
    """3,000 users with 20 of 400 items each, of which one is held out; a user's items are near each other."""
    draw = np.random.default_rng(0)
    near = draw.integers(0, 400, 3000)[:, None] + draw.normal(0, 20, (3000, 20)).astype(int)
    return Histories(
        np.repeat(np.arange(3000), 20), (near % 400 + 1).astype(np.int32).ravel(), 0.05
    ), 401


def test_some_targets_users_and_neighbours_stand_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    found, items = large()
    ticks: list[int] = []
    made = Baselines(found, items, np.arange(1, items))
    whole = made.measured(found.held_rows(8), lambda: ticks.append(1))
    assert len(ticks) > items - 1  # each item's similarities, and targets
    monkeypatch.setattr(baselines, "MOST_TARGETS", 1500)
    monkeypatch.setattr(baselines, "MOST_USERS", 60)
    monkeypatch.setattr(baselines, "KEPT_BYTES", 8 * 400 * 100)
    assert len(made._similarities(7, 100)[0]) == 100
    some = made.measured(found.held_rows(8), nothing)
    assert whole["knn_recall_at_10"] > 3 * whole["popularity_recall_at_10"]
    for key, value in whole.items():  # popularity is measured on all of them
        assert some[key] == pytest.approx(value, abs=0.02 if key.startswith("knn") else 0), key


def test_the_baselines_rank_only_the_items_of_the_data(tmp_path: Path) -> None:
    path, sums = made(tmp_path), LossSum(0.0, 0.0, (0.0,) * len(RANKED))
    own = len(np.unique(read_ratings(path, DataChoice(), nothing).items))
    told = []
    for items in (own, 20 * own):
        data = opened(path, tmp_path / f"{items}", items)
        told.append(data.judged(sums, BatchShape(1, 4, 8), 0, None, nothing).metrics)  # type: ignore[arg-type]
    assert told[0] == pytest.approx(told[1])


def test_the_measures_of_a_ranking_follow_their_definitions() -> None:
    found = ranked(np.array([1, 2, 6, 50]))
    assert found["recall_at_1"] == 0.25
    assert found["recall_at_5"] == 0.5
    assert found["recall_at_10"] == 0.75
    assert found["mrr_at_10"] == pytest.approx((1 + 1 / 2 + 1 / 6) / 4)
    assert found["ndcg_at_5"] == pytest.approx((1 + 1 / np.log2(3)) / 4)


# making


def test_made_ratings_are_the_same_for_a_seed_and_nobody_meets_an_item_twice(
    tmp_path: Path,
) -> None:
    path = made(tmp_path)
    before = path.read_bytes()
    make(Request("ratings", path.parent, Size(1500, None), 0, OPTIONS))
    assert path.read_bytes() == before
    assert made(tmp_path, seed=1).read_bytes() != before
    ratings = read_ratings(path, DataChoice(), nothing)
    pairs = list(zip(ratings.users.tolist(), ratings.items.tolist(), strict=True))
    assert len(pairs) == len(set(pairs)) >= 1500
    counts = np.sort(np.bincount(ratings.items))[::-1]
    assert counts[:6].sum() > 1.5 * counts[30:36].sum()  # a few items are popular
    follows = np.zeros((61, 61))
    same = ratings.users[1:] == ratings.users[:-1]
    np.add.at(follows, (ratings.items[:-1][same], ratings.items[1:][same]), 1)
    assert np.sort(follows, axis=1)[:, -4:].sum() > 0.4 * follows.sum()  # and a few follow each


# a folder


def opened(source: Path, directory: Path, items: int = 60) -> RatingData:
    directory.mkdir()
    wanted = {"data.source": str(source), "model.items": items, "model.clusters": 6}
    asked = plan(**wanted)
    check(asked)
    return open_data(asked, catalog.model(asked), directory, Quiet(), {})


def test_a_folder_of_movielens_is_the_file_of_ratings_in_it(tmp_path: Path) -> None:
    file = made(tmp_path)
    (file.parent / "README").write_text("about these data")
    whole = opened(file.parent, tmp_path / "a")
    assert whole.fingerprints == opened(file, tmp_path / "b").fingerprints
    entry = catalog.dataset(plan(**{"data.source": str(file.parent)}))
    assert (entry.where, entry.bytes) == (str(file), file.stat().st_size)
    found = inspect(replace(Plan(), {"data.source": str(file.parent)}))
    assert (found.kind, found.documents) == (
        "ratings",
        len(read_ratings(file, DataChoice(), nothing).items),
    )


def test_a_table_of_ratings_is_found_among_the_others_of_its_folder(tmp_path: Path) -> None:
    (tmp_path / "links.csv").write_text("movieId,imdbId\n10,1\n")
    (tmp_path / "ratings.csv").write_text("userId,movieId,rating,timestamp\n1,10,4.5,100\n")
    assert inspect(replace(Plan(), {"data.source": str(tmp_path)})).kind == "ratings"


def test_a_folder_whose_table_is_text_stays_a_folder_of_tables(tmp_path: Path) -> None:
    for name in ("ratings.csv", "reviews.csv"):
        (tmp_path / name).write_text("text,stars\nsome words,3\n")
    asked = replace(Plan(), {"data.source": str(tmp_path)})
    assert catalog.dataset(asked).format == "directory"
    assert inspect(asked).documents == 2
    with pytest.raises(PlanError, match=r"or a folder with ratings\.dat or ratings\.csv"):
        check(plan(**{"data.source": str(tmp_path)}))


def test_the_table_of_a_folder_may_have_the_columns_that_the_plan_names(tmp_path: Path) -> None:
    table = tmp_path / "ratings.csv"
    table.write_text("Kunde,Artikel,wann\n" + "".join(f"a,{i},{i}\n" for i in range(9)))
    named = {"data.user_column": "Kunde", "data.item_column": "Artikel", "data.time_column": "wann"}
    asked = plan(**{"data.source": str(tmp_path), **named})
    check(asked)
    assert catalog.dataset(asked).where == str(table)
    assert inspect(asked).kind == "ratings"
    with pytest.raises(
        PlanError, match=r"has no such column.*its columns are: Kunde, Artikel, wann"
    ):
        check(replace(asked, {"data.item_column": "item"}))
