"""Plans, models and tokenizers that are damaged, endless or no files: one line of refusal each."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from memconsole import regular_file
from memconsole.devices.budget import budget
from memconsole.memory.estimate import estimate
from memconsole.plan import catalog, plan_file
from memconsole.plan import plan as plans
from memconsole.plan.check import check
from memconsole.plan.data.paths import load
from memconsole.plan.plan import Plan, PlanError
from memconsole.tui.keys.keymap import read_keymap
from memconsole.tui.plan.dialogs.choices import _files_with
from memconsole.tui.screens.prompt import path_refusal
from tests.tui.harness import readings

Put = Callable[[Path], Path]
NUMBERS = (
    "0", "-1", "1", "257", "1_000_000_000_000", "9223372036854775808", "9" * 60, "9" * 400,
    "0.0", "-0.5", "5e-324", "1e300", "1e308", "nan", "inf", '""', '"\\u001b[2J"', "true", "[]",
)  # fmt: skip


def test_a_plan_that_is_no_file_is_refused_in_one_line(no_file: Put, tmp_path: Path) -> None:
    path = no_file(tmp_path / "plan.toml")
    with pytest.raises(PlanError, match=r"plan\.toml: cannot be read: ") as refused:
        load(path)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("path", ["~nobody-here/x", "x" * 300, "~nobody-here/x.jinja"])
@pytest.mark.parametrize("key", ["model.weights", "data.template", "data.tokenizer", "data.source"])
def test_a_path_that_no_file_can_have_is_refused_by_its_key(key: str, path: str) -> None:
    plan = plans.replace(Plan(), {key: path})
    with pytest.raises(PlanError) as refused:
        check(plan)
    assert "\n" not in str(refused.value)


def test_the_files_beside_data_of_an_unknown_user_are_none() -> None:
    assert _files_with((".json",), plans.replace(Plan(), {"data.source": "~nobody-here/x"})) == []


def test_what_a_name_belongs_to_is_said(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_bytes(b"x" * 11)
    for name, words in {
        "pipe": "a named pipe, not a file",
        ".": "a folder, not a file",
        "/dev/zero": "a device, not a file",
        "large": "larger than 10 bytes",
        "nul\0": "not a file name",
        "\ud800": "not a file name",
    }.items():
        with pytest.raises(OSError) as refused:  # noqa: PT011 (its words are compared below)
            regular_file.read(tmp_path / name, 10)
        assert refused.value.strerror == words
    (tmp_path / "link").symlink_to(tmp_path / "large")
    assert regular_file.read(tmp_path / "link", 11) == b"x" * 11
    with pytest.raises(regular_file.NotRegularError):
        regular_file.read(tmp_path / "link", 11, follow=False)


def test_numbers_of_hundreds_of_digits_are_refused_by_their_key() -> None:
    for key in ("train.weight_decay", "train.batch_size", "train.seed", "data.stride"):
        with pytest.raises(PlanError, match=rf"^{key} = a number of more than 60 digits"):
            plans.apply_settings(Plan(), [f"{key}={'9' * 400}"])


def test_a_mutated_plan_is_priced_or_refused_in_one_line() -> None:
    chance = random.Random(26)
    devices, priced, said = readings(1), 0, []
    whole = plan_file.dumps(Plan()).splitlines()
    for _ in range(150):
        lines = list(whole)
        for _ in range(chance.choice((1, 1, 2))):
            place = chance.randrange(len(lines))
            key, equals, _value = lines[place].partition(" = ")
            lines[place] = f"{key} = {chance.choice(NUMBERS)}" if equals else lines[place]
        try:
            plan = plan_file.loads("\n".join(lines))
            check(plan)
            priced += estimate(plan, budget(plan, devices)).table.device_bytes > 0
        except PlanError as error:
            said.append(str(error))
    assert priced > 15
    assert len(said) > 15
    assert not set("".join(said)) & {"\n", "\x1b"}


@pytest.mark.parametrize("name", ["..", "../..", "a/..", "../a", ".a/b", "a/b/.."])
def test_a_hub_name_is_never_a_path(name: str) -> None:
    with pytest.raises(PlanError, match=r"expected hf://owner/name"):
        check(plans.replace(Plan(), {"data.source": f"hf://{name}"}))


def test_a_model_whose_configuration_is_no_file_is_refused(no_file: Put, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    no_file(tmp_path / "model/config.json")
    with pytest.raises(PlanError, match=r"config\.json"):
        catalog.architecture(plans.replace(Plan(), {"model.name": str(tmp_path / "model")}))


def test_a_configuration_nested_too_deeply_or_endless_is_refused(tmp_path: Path) -> None:
    plan = plans.replace(Plan(), {"model.name": str(tmp_path)})
    for text in (
        "[" * 100_000,
        '{"a":' * 100_000,
        "\0" * 10,
        json.dumps({"model_type": "x" * 9999}),
    ):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(PlanError, match=r"config\.json") as refused:
            catalog.architecture(plan)
        assert len(str(refused.value)) < 1000


def test_a_tokenizer_that_is_no_file_is_refused(no_file: Put, tmp_path: Path) -> None:
    path = no_file(tmp_path / "tokenizer.json")
    with pytest.raises(PlanError, match=r"data\.tokenizer"):
        check(plans.replace(Plan(), {"data.tokenizer": str(path)}))


def test_a_keymap_that_is_no_file_leaves_the_built_in_keys(no_file: Put, tmp_path: Path) -> None:
    keymap = read_keymap(no_file(tmp_path / "keys.toml"))
    assert keymap.table == read_keymap(tmp_path / "absent").table
    assert len(keymap.problems) == keymap.there


def test_a_plan_is_saved_over_files_alone(tmp_path: Path) -> None:
    refusal = path_refusal()
    os.mkfifo(tmp_path / "pipe")
    assert refusal(str(tmp_path / "pipe")) == f"{tmp_path / 'pipe'} is no file"
    assert refusal("/dev/null") == "/dev/null is no file"
    assert refusal(str(tmp_path / "new.toml")) is None


def test_adapters_imply_a_frozen_base() -> None:
    wanted = plans.apply_settings(Plan(), ["model.name=gpt2", "optimize.lora_rank=16"])
    check(wanted)
    explicit = plans.replace(wanted, {"optimize.freeze_base": True})
    device = budget(wanted, readings())
    assert estimate(wanted, device).table.components == estimate(explicit, device).table.components
