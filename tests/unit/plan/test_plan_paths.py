"""Relative paths of a plan: those of a plan file start from its folder, and a launched plan depends on no folder."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from memconsole.cli.main import cli
from memconsole.plan import plan as plans
from memconsole.plan.check import check
from memconsole.plan.data.paths import absolute, anywhere, load
from memconsole.plan.plan import Plan, PlanError, replace
from memconsole.plan.plan_file import dumps, loads

FILES = {
    "data.source": "texts/a.txt",
    "data.validation": "held.txt",
    "data.template": "chat.jinja",
    "data.tokenizer": "own",
    "model.name": "models/base",
    "model.decoder": "../decoder",
    "model.weights": "runs/r/checkpoints/best",
}
"""Every setting that names one file or folder, with a relative path."""


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder beside the current one, which holds files of the same names."""
    here, other = tmp_path / "here", tmp_path / "other"
    for folder in (here, other):
        (folder / "models" / "base").mkdir(parents=True)
        (folder / "same.txt").write_text("words " * 100)
    monkeypatch.chdir(here)
    return other


def plan_file(folder: Path, changes: dict[str, str]) -> Path:
    """A plan file of a person, with paths as they wrote them."""
    file = folder / "p.toml"
    file.write_text(dumps(replace(Plan(), changes), full=False))
    return file


def test_paths_of_a_plan_file_start_from_its_folder(elsewhere: Path) -> None:
    found = load(plan_file(elsewhere, {**FILES, "data.mix": "b.txt=0.25, tinystories=0.5"}))
    assert {key: plans.get(found, key) for key in FILES} == {
        key: str(elsewhere / path) for key, path in FILES.items()
    }
    assert found.data.mix == f"{elsewhere}/b.txt=0.25, tinystories=0.5"
    assert load(Path("../other/p.toml")).data.source == f"{Path.cwd()}/../other/texts/a.txt"


def test_names_and_absolute_paths_of_a_plan_file_stay(elsewhere: Path, tmp_path: Path) -> None:
    named = {
        "data.source": "hf://owner/name",
        "data.validation": "validation[:1%]",
        "data.template": "chatml",
        "data.tokenizer": str(tmp_path / "tokenizer.json"),
        "data.mix": "equipment=0.1",
        "model.name": "owner/name",
        "model.decoder": "gpt2",
        "model.weights": "random",
    }
    assert load(plan_file(elsewhere, named)) == replace(Plan(), named)
    for name in ("equipment", "python-stdlib"):
        assert load(plan_file(elsewhere, {"data.source": name})).data.source == name
    assert load(plan_file(elsewhere, {"data.template": "{{ a }}"})).data.template == "{{ a }}"


def test_a_file_that_only_the_current_folder_has_is_not_taken_for_that_of_a_plan_file(
    elsewhere: Path,
) -> None:
    file = plan_file(elsewhere, {"data.source": "same.txt"})
    check(load(file))
    (elsewhere / "same.txt").unlink()
    with pytest.raises(PlanError, match=f'data.source = "{elsewhere}/same.txt": no such file'):
        check(load(file))


def test_a_mistyped_name_in_a_plan_file_still_has_a_hint(elsewhere: Path) -> None:
    with pytest.raises(PlanError, match='did you mean "stories"'):
        check(load(plan_file(elsewhere, {"data.source": "storis"})))
    with pytest.raises(PlanError, match='did you mean "gpt2"'):
        check(load(plan_file(elsewhere, {"model.name": "gtp2"})))


@pytest.mark.parametrize("content", ["", " \n"])
def test_an_empty_plan_file_is_not_taken_for_the_default_plan(
    content: str, elsewhere: Path
) -> None:
    """A command that failed leaves one: ``memconsole fit --toml > p.toml`` where nothing fits."""
    (elsewhere / "p.toml").write_text(content)
    with pytest.raises(PlanError, match=r"p\.toml: is empty; expected settings"):
        load(elsewhere / "p.toml")


def test_a_printed_plan_can_be_kept_in_any_folder(elsewhere: Path) -> None:
    given = ["--set", "data.source=same.txt"]
    for command in (["plan"], ["fit", "--budget", "8GiB"]):
        printed = CliRunner().invoke(cli, [*command, *given, "--toml"]).stdout
        assert loads(printed).data.source == f"{Path.cwd()}/same.txt"
    file = elsewhere / "printed.toml"
    file.write_text(printed)
    assert load(file).data.source == f"{Path.cwd()}/same.txt"


@pytest.mark.parametrize(
    "words", [["plan", "--toml"], ["fit", "--toml"], ["train"], ["export-job", "--to", "skypilot"]]
)
def test_a_current_folder_that_is_gone_is_said(words: list[str], elsewhere: Path) -> None:
    if words[0] == "export-job":
        words = [*words, str(plan_file(elsewhere, {"device.name": "cpu"}))]
    shutil.rmtree(Path.cwd())
    result = CliRunner().invoke(cli, words)
    assert isinstance(result.exception, PlanError)
    assert str(result.exception) == "the current folder is gone: change to one that exists"


def test_a_mixture_in_a_folder_with_a_comma_is_refused_and_one_of_other_folders_is_not(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    comma = elsewhere / "a,b"
    comma.mkdir()
    monkeypatch.chdir(comma)
    mixed = {"data.mix": "y.txt=0.3"}
    for refused in (
        lambda: absolute(replace(Plan(), mixed)),
        lambda: load(plan_file(comma, mixed)),
    ):
        with pytest.raises(
            PlanError, match=r'^data\.mix = "y\.txt=0\.3": the comma in ".*a,b/y\.txt"'
        ):
            refused()
    mix = f"{elsewhere}/y.txt=0.3, stories=0.1"
    assert absolute(replace(Plan(), {"data.mix": mix})).data.mix == mix


def test_a_launched_plan_depends_on_no_folder(elsewhere: Path) -> None:
    plan = replace(Plan(), {"data.mix": "same.txt=0.2, stories=0.1", "data.validation": "stories"})
    with pytest.raises(PlanError, match=r"stories\.txt is not in this folder"):
        anywhere(plan)
    here = Path.cwd()
    (here / "stories.txt").write_text("words " * 100)
    found = anywhere(plan)
    assert found.data.mix == f"{here}/same.txt=0.2, {here}/stories.txt=0.1"
    assert found.data.validation == f"{here}/stories.txt"
    assert absolute(plan).data.validation == "stories"


def test_random_weights_stay_random_where_the_path_of_the_model_becomes_absolute(
    elsewhere: Path,
) -> None:
    plan = replace(Plan(), {"model.name": "models/base", "model.weights": "random"})
    assert absolute(plan).model.weights == "random"


def test_the_checkpoint_that_best_is_now_is_launched(elsewhere: Path) -> None:
    (elsewhere / "step-3").mkdir()
    (elsewhere / "best").symlink_to("step-3")
    plan = replace(Plan(), {"model.weights": str(elsewhere / "best")})
    assert anywhere(plan).model.weights == str(elsewhere / "step-3")
