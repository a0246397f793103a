"""A folder says which of its files are read and which are left out, wherever the data are described."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from memconsole.announcing import launch_rows
from memconsole.cli.main import cli
from memconsole.cli.plans.plan_words import document, text
from memconsole.cli.plans.sources import refusal
from memconsole.memory.estimate import estimate
from memconsole.plan.catalog.folders import folder
from memconsole.plan.data.left_out import left_out, left_out_shortly
from memconsole.plan.plan import Plan, PlanError, replace
from memconsole.start import check_launch
from memconsole.tui.plan.widgets.plan_summary import summary_lines
from memconsole.tui.views.plan_view import PlanView
from tests.unit.memory.cards import card

ROW = json.dumps({"text": "some words"}) + "\n"


def made(root: Path, *names: str) -> Path:
    """A folder called corpus with files of these names; `empty` in a name leaves the file empty."""
    for name in names:
        path = root / "corpus" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("" if "empty" in name else ROW)
    return root / "corpus"


def plan(source: Path, **changes: Any) -> Plan:
    return replace(Plan(), {"data.source": str(source), "device.name": "cpu", **changes})


def words(source: Path) -> str:
    found = folder(source)
    assert found is not None
    return found.words


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (["a.jsonl", "b/c.ndjson"], ""),
        (["a.jsonl", "README.md"], "takes 1 .jsonl file (23 B), leaves out 1 .md"),
        (
            ["a.jsonl.gz", "b.jsonl", "config.json", "x.bin", "y.bin", "LICENSE", ".git/a.txt"],
            "takes 2 .jsonl files (46 B), leaves out 2 .bin, 1 .json of configuration, 1 hidden, 1 without suffix",
        ),
        (
            ["a.txt", "README.md", "empty.txt", "__pycache__/b.txt", "c.\x1b[1m"],
            "takes 2 text files (46 B), leaves out 1 __pycache__/, 1 empty, 1 of another kind",
        ),
        (
            ["a.csv", "a.bin", "a.png", "a.pdf", "a.zip", "a.gif", "b.gif"],
            "takes 1 .csv file (23 B), leaves out 2 .gif, 1 .bin, 1 .pdf, 1 .png, 1 more",
        ),
    ],
)
def test_a_folder_counts_what_is_left_out_by_its_kind(
    names: list[str], told: str, tmp_path: Path
) -> None:
    assert words(made(tmp_path, *names)) == told


@pytest.mark.parametrize(
    ("names", "splits"),
    [
        (["train_sft-0.jsonl", "train_gen-0.jsonl", "test_sft-0.jsonl"], ("test", "train")),
        (["train.txt", "valid.txt"], ("train", "valid")),
        (["train/0.jsonl", "dev/0.jsonl"], ("dev", "train")),
        (["train-0.jsonl", "train-1.jsonl", "testimony.jsonl"], ()),
        (["train.py", "test_it.py"], ()),
    ],
)
def test_a_folder_says_that_it_holds_several_splits(
    names: list[str], splits: tuple[str, ...], tmp_path: Path
) -> None:
    corpus = made(tmp_path, *names)
    found = folder(corpus)
    assert found is not None
    assert found.splits == splits
    assert ("leaves out" in found.words, bool(found.words)) == (False, bool(splits))
    assert left_out_shortly(plan(corpus)) == ("several splits" if splits else "")
    for said in left_out(plan(corpus)):
        assert f"; reads the splits {', '.join(splits)} as one: to hold one out, give" in said


def test_a_file_with_several_names_is_read_once(tmp_path: Path) -> None:
    corpus = made(tmp_path, "a.txt", "b.txt", "c/d.txt")
    (corpus / "e.txt").symlink_to(corpus / "a.txt")
    (corpus / "c" / "a.txt").hardlink_to(corpus / "b.txt")
    (corpus / "f.txt").symlink_to(made(tmp_path / "elsewhere", "f.txt") / "f.txt")
    found = folder(corpus)
    assert found is not None
    names = [str(path.relative_to(corpus)) for path in found.files]
    assert names == ["a.txt", "b.txt", "c/d.txt", "f.txt"]
    assert found.words == "takes 4 text files (92 B), leaves out 2 linked file"


def test_a_linked_folder_and_what_cannot_be_read_are_counted(tmp_path: Path) -> None:
    source = made(tmp_path, "a.txt")
    (tmp_path / "elsewhere").mkdir()
    (source / "link").symlink_to(tmp_path / "elsewhere")
    (source / "lost.txt").symlink_to(tmp_path / "nowhere")
    os.mkfifo(source / "pipe.txt")
    assert words(source) == "takes 1 text file (23 B), leaves out 2 unreadable, 1 linked folder"


def test_every_place_that_describes_the_data_says_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = plan(made(tmp_path, "a.jsonl", "b.jsonl"))
    found = estimate(whole, card(2**34))
    assert document(whole, found)["files"] == ()
    assert "files" not in dict(launch_rows(whole, found))
    assert "leaves out" not in text(whole, found)

    mixed = plan(made(tmp_path / "mixed", "a.jsonl", "b.jsonl", "c.bin"))
    said = "corpus takes 2 .jsonl files (46 B), leaves out 1 .bin"
    found = estimate(mixed, card(2**34))
    assert f"\ndata {said}\n" in text(mixed, found)
    assert document(mixed, found)["files"] == (said,)
    assert dict(launch_rows(mixed, found))["files"] == said
    monkeypatch.chdir(tmp_path / "mixed")  # a short name, so that widths decide alone
    near = PlanView(plan(Path("corpus")))
    wide, narrow = (
        "".join(span.text for span in summary_lines(near, width, 7)[1]) for width in (400, 80)
    )
    assert wide.endswith(f"tokens/row · {said}")
    assert narrow.endswith("tokens/row · 1 left out")


def test_each_source_of_a_mixture_says_its_own(tmp_path: Path) -> None:
    first, second = (
        made(tmp_path / "1", "a.txt", "b.bin"),
        made(tmp_path / "2", "a.txt", "empty.md"),
    )
    held = made(tmp_path / "3", "a.txt", "b.png", "c.png")
    mixed = plan(first, **{"data.mix": f"{second}=0.5", "data.validation": str(held)})
    assert [line.partition("leaves out ")[2] for line in left_out(mixed)] == [
        "1 .bin",
        "1 empty",
        "2 .png",
    ]
    assert left_out_shortly(mixed) == "4 left out"


def test_inspecting_a_folder_says_it(tmp_path: Path) -> None:
    source = made(tmp_path, "a.txt", "b.bin")
    told = "takes 1 text file (23 B), leaves out 1 .bin"
    look = ["data", "inspect", "--no-lengths", str(source)]
    shown = CliRunner().invoke(cli, look)
    assert told in " ".join(shown.output.split())
    assert json.loads(CliRunner().invoke(cli, [*look, "--json"]).output)["files"] == told


def test_a_file_that_cannot_be_opened_is_refused_before_a_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = made(tmp_path, "a.txt", "b.txt")
    shut, opened = corpus / "b.txt", os.open

    def denied(path: Any, *arguments: Any, **options: Any) -> int:
        if path == shut:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return opened(path, *arguments, **options)

    monkeypatch.setattr(os, "open", denied)
    words = f"{shut}: cannot be read: Permission denied"
    for source in (corpus, shut):
        with pytest.raises(PlanError) as error:
            check_launch(plan(source), None)
        assert str(error.value) == words
        assert refusal(plan(source), "cpu") == words
    check_launch(plan(corpus / "a.txt"), None)


@pytest.mark.parametrize(
    ("owner", "call", "closed"),
    [(os, "scandir", "corpus"), (os, "scandir", "corpus/b"), (Path, "stat", "corpus/b/c.txt")],
)
def test_a_folder_that_cannot_be_read_is_refused(
    owner: Any, call: str, closed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = made(tmp_path, "a.txt", "b/c.txt")
    shut, asked = tmp_path / closed, getattr(owner, call)

    def denied(path: Any, **options: Any) -> Any:
        if Path(path) == shut:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return asked(path, **options)

    monkeypatch.setattr(owner, call, denied)
    place = "" if shut == corpus else f"{shut} "
    with pytest.raises(PlanError, match=f'corpus": {place}cannot be read: Permission denied'):
        folder(corpus)
