"""Plans: files and arguments come back as they went out; every mistake is one line."""

from __future__ import annotations

import copy
import pickle
import string
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Meta

from memconsole.plan.data.paths import load
from memconsole.plan.plan import (
    SETTINGS,
    Plan,
    PlanError,
    Setting,
    apply_settings,
    command_line,
    get,
    nearest,
    parse_value,
    printable,
    quote,
    replace,
)
from memconsole.plan.plan_file import dumps, from_document, loads, to_document

words = st.text(
    st.characters(exclude_categories=["C", "Z"], include_characters=" "), min_size=1, max_size=20
)


def value_of(key: str) -> st.SearchStrategy[Any]:
    """Values a setting allows, none where it is optional."""
    setting = SETTINGS[key]
    values: st.SearchStrategy[Any]
    if key == "backend":
        return st.sampled_from(["torch", "jax"])
    if setting.choices:
        return st.sampled_from(setting.choices)
    if setting.holds is bool:
        values = st.booleans()
    elif setting.holds is str:
        values = words
    else:
        values = numbers(setting)
    allowed = values.filter(lambda value: _allows(key, value))
    return st.none() | allowed if setting.optional else allowed


def numbers(setting: Setting) -> st.SearchStrategy[Any]:
    """Numbers between the limits of a setting, or up to 2 million (floats: 10) if it has no upper one."""
    meta = next(m for m in _limits(setting.type) if (m.ge, m.gt) != (None, None))
    least = meta.gt if meta.ge is None else meta.ge
    most = meta.lt if meta.le is None else meta.le
    if setting.holds is int:
        return st.integers(int(least), int(2_000_000 if most is None else most))
    return st.floats(
        least,
        10.0 if most is None else most,
        exclude_min=meta.ge is None,
        exclude_max=meta.lt is not None,
    )


def _limits(kind: Any) -> Iterator[Meta]:
    for part in get_args(kind):
        yield from [part] if isinstance(part, Meta) else _limits(part)


def _allows(key: str, value: Any) -> bool:
    try:
        msgspec.convert(value, SETTINGS[key].type)
    except msgspec.ValidationError:
        return False
    return True


plans = st.fixed_dictionaries({}, optional={key: value_of(key) for key in SETTINGS}).map(
    lambda changes: replace(Plan(), changes)
)


@given(plans, st.booleans())
def test_a_plan_file_reads_back_as_the_plan(plan: Plan, full: bool) -> None:
    assert loads(dumps(plan, full=full)) == plan
    assert from_document(to_document(plan, full=full)) == plan


def test_the_former_word_for_a_base_that_is_not_quantized_is_read() -> None:
    given = replace(Plan(), {"optimize.lora_rank": 8, "optimize.base_storage": "int8"})
    assert parse_value("optimize.base_storage", "bf16") == "none"
    former = dumps(given).replace('"int8"', '"bf16"')
    assert former != dumps(given)
    assert loads(former) == replace(given, {"optimize.base_storage": "none"})


@given(plans)
def test_the_command_line_makes_the_plan_again(plan: Plan) -> None:
    arguments = command_line(plan)
    assert arguments[::2] == ["--set"] * (len(arguments) // 2)
    stripped = {  # what surrounds a text on a command line is not part of it
        key: get(plan, key).strip() for key in SETTINGS if isinstance(get(plan, key), str)
    }
    if stripped.get("data.tokenizer", "x").lower() in ("", "none"):
        stripped["data.tokenizer"] = None
    assert apply_settings(Plan(), arguments[1::2]) == replace(plan, stripped)


@given(plans)
def test_plans_are_values(plan: Plan) -> None:
    assert hash(plan) == hash(copy.deepcopy(plan))
    assert pickle.loads(pickle.dumps(plan)) == plan
    with pytest.raises(AttributeError):
        plan.backend = "other"  # type: ignore[misc]


def test_a_short_file_holds_only_what_differs() -> None:
    plan = replace(Plan(), {"train.epochs": 5})
    assert to_document(plan) == {"backend": "torch", "train": {"epochs": 5}}


def test_every_setting_is_described() -> None:
    for key, setting in SETTINGS.items():
        assert setting.help, key
        assert setting.expects, key
        assert get(Plan(), key) == setting.default


# one line for every mistake

toml_values = st.recursive(
    st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=12)
    | st.datetimes()
    | st.dates(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)
names = st.sampled_from(sorted({part for key in SETTINGS for part in key.split(".")})) | st.text(
    max_size=10
)
documents = st.dictionaries(
    st.sampled_from(["backend", "model", "data", "device", "train", "optimize", "hybrid"])
    | st.text(max_size=10),
    toml_values | st.dictionaries(names, toml_values, max_size=3),
    max_size=4,
)


def refusal(call: Callable[[], object]) -> PlanError | None:
    """The plan error a call raises; any other exception fails the test."""
    try:
        call()
    except PlanError as error:
        return error
    return None


def assert_one_line(error: PlanError) -> None:
    text = str(error)
    assert text
    assert text.isprintable(), "no control character reaches the terminal"
    assert len(text) < 3000


@given(documents)
def test_any_document_is_a_plan_or_a_one_line_error(document: dict[str, Any]) -> None:
    try:
        plan = from_document(document, "some\nfile")
    except PlanError as error:
        assert_one_line(error)
    else:
        assert loads(dumps(plan)) == plan


@given(st.text() | st.text(string.ascii_lowercase + "[]{}=.\"'\n1", max_size=60))
def test_any_text_is_a_plan_or_a_one_line_error(text: str) -> None:
    try:
        loads(text)
    except PlanError as error:
        assert_one_line(error)


@given(st.sampled_from(sorted(SETTINGS)) | st.text(max_size=20), toml_values)
def test_any_value_for_any_key_is_taken_or_refused_by_key(key: str, value: Any) -> None:
    error = refusal(lambda: replace(Plan(), {key: value}))
    if error is not None:
        assert_one_line(error)
        assert error.key == key


@given(st.sampled_from(sorted(SETTINGS)), st.text(max_size=30))
def test_any_argument_is_taken_or_refused_by_key(key: str, text: str) -> None:
    error = refusal(lambda: apply_settings(Plan(), [f"{key}={text}"]))
    if error is not None:
        assert_one_line(error)
        assert error.key == key


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[model\n", "not valid TOML"),
        ("x = " + "9" * 5000, "not valid TOML"),
        ("x = " + "[" * 20_000, "not valid TOML"),
        ("model = 3", "must be a table"),
        ("modle = 3", 'did you mean "model"'),
        ("[train]\nbatchsize = 4", 'did you mean "train.batch_size"'),
        ("[train]\nbatch_size = 0", "a whole number >= 1 and <= 1,048,576"),
        ("[train]\nbatch_size = 2.5", "a whole number"),
        ("[train]\nbatch_size = true", "batch_size = true"),
        ('[train]\nbatch_size = "4"', 'batch_size = "4"'),
        ("[train]\nlearning_rate = inf", "learning_rate = inf"),
        ("[train]\nlearning_rate = nan", "learning_rate = nan"),
        ("[train]\nseed = -1", ">= 0 and < 4,294,967,296"),
        ("[train]\nmax_steps = 9_000_000_000_000", "<= 1,000,000,000,000, or none"),
        ("[train]\nepochs = 1" + "0" * 400, "more than 60 digits"),
        ("[data]\nstreaming = 1", "true or false"),
        ("[data]\nsource = true", "source = true: expected text"),
        ('[data]\nsource = "a\\u001b[31mb"', r"\x1b[31m"),
        ('[optimize]\nprecision = "bf61"', 'did you mean "bf16"'),
        ("[optimize]\nprecision = 16", "fp32 | bf16 | fp16"),
        ('backend = "pytorch"', "torch | jax"),
        ("backend = [1]", "backend = [1]"),
    ],
)
def test_a_mistake_in_a_file_names_key_value_and_what_is_allowed(text: str, words: str) -> None:
    with pytest.raises(PlanError) as error:
        loads(text, "mine.toml")
    assert_one_line(error.value)
    assert words in str(error.value)
    assert str(error.value).startswith("mine.toml: ")


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("train.batch_size", "8", 8),
        ("train.batch_size", " 1_000 ", 1000),
        ("model.target_params", "1e9", 1_000_000_000),
        ("train.learning_rate", "3", 3.0),
        ("train.learning_rate", ".5", 0.5),
        ("train.learning_rate", "5e-4", 5e-4),
        ("data.streaming", "False", False),
        ("data.stride", "none", None),
        ("data.stride", "64", 64),
        ("data.source", "123", "123"),
        ("data.tokenizer", "7", "7"),
        ("device.memory_fraction", "1", 1.0),
    ],
)
def test_arguments_are_typed_by_their_key(key: str, text: str, value: Any) -> None:
    got = parse_value(key, text)
    assert got == value
    assert type(got) is type(value)


def test_arguments_need_an_equals_sign_and_a_known_key() -> None:
    with pytest.raises(PlanError, match="is not key=value"):
        apply_settings(Plan(), ["train.epochs"])
    with pytest.raises(PlanError, match=r'did you mean "optimize\.precision"'):
        apply_settings(Plan(), ["precision=bf16"])
    with pytest.raises(PlanError, match=r"train\.learning_rate"):
        apply_settings(Plan(), ["train.zzzzz=1"])


def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    bad = tmp_path / "bad.toml"
    bad.write_bytes(b"\xff\xfe")
    for path in (tmp_path / "none\n.toml", tmp_path, bad, Path("a\0b")):
        with pytest.raises(PlanError, match="cannot be read") as error:
            load(path)
        assert_one_line(error.value)


def test_the_effective_batch_multiplies_rows_steps_and_devices() -> None:
    plan = replace(
        Plan(), {"train.batch_size": 4, "optimize.accumulation_steps": 8, "device.count": 2}
    )
    assert plan.effective_batch == 64
    assert plan.tokens_per_step == 64 * 128
    assert plan.stride == 128
    assert replace(plan, {"data.stride": 5}).stride == 5


@given(st.text(max_size=400))
def test_printed_text_is_one_printable_line(text: str) -> None:
    assert printable(text).isprintable()
    assert quote(text).isprintable()


def test_nearest_is_silent_where_nothing_is_near() -> None:
    assert nearest("zzz", ["model"]) == ""
    assert nearest("x" * 10**6, ["model"]) == ""


def test_a_name_that_begins_with_the_word_is_nearer_than_a_similar_one() -> None:
    names = ["h200", "h100-80gb"]
    assert nearest("h100", names) == ' — did you mean "h100-80gb"?'
    assert nearest("h20", names) == ' — did you mean "h200"?'
    assert nearest("h100-80gd", names) == ' — did you mean "h100-80gb"?'
