"""Checks the settings of records: refuses a template, a loss on answers or a tokenizer setting that does not fit the
plan's data."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from memconsole.once_per_version import once_per_version
from memconsole.plan import catalog
from memconsole.plan.catalog.cells import separator
from memconsole.plan.catalog.compression import first_lines
from memconsole.plan.catalog.encodings import HEAD_BYTES, encoding_of, is_binary
from memconsole.plan.catalog.entries import DatasetEntry
from memconsole.plan.catalog.folders import folder, plain_suffix
from memconsole.plan.models.files import tokenizer_file
from memconsole.plan.plan import Plan, PlanError, printable, quote
from memconsole.plan.templates.chat import CHOSEN, COLUMNS, REJECTED, RecordError, is_chat
from memconsole.plan.templates.choice import (
    KEY,
    MODEL,
    has_own,
    template_of,
    templates,
    templates_with_fields,
)
from memconsole.regular_file import open_regular

if TYPE_CHECKING:
    from memconsole.plan.templates.template import Template

MOST_BYTES = 1 << 20
"""Bytes of the records that are checked; a longer first record is not."""


def check_records(plan: Plan) -> None:
    """Raise `PlanError` for the first setting of records that does not fit."""
    d, entry = plan.data, catalog.dataset(plan)
    template = template_of(plan)
    if plan.learns_answers and (template is None or not template.marks_answers):
        key, value = "data.loss_on", "answers"
        if plan.learns_pairs:
            key, value = "train.objective", plan.train.objective
        raise PlanError(f"{key} = {value}: {_why_none(template)}", key)
    tokenizer = given_tokenizer(plan)
    given = tokenizer.words if tokenizer is not None else ""
    if d.lowercase and given:
        raise PlanError(
            f"data.lowercase = true: {given} is used, and writes as it was made to",
            "data.lowercase",
        )
    if d.code_field is not None:
        _check_codes(d.code_field, template, given)
    if template is not None:
        _check_source(plan, entry)
        if d.stride is not None:
            raise PlanError(
                f"data.stride = {d.stride:,}: records are packed whole, and rows do not overlap; "
                "leave it out",
                "data.stride",
            )
    _check_first(plan, entry, template)


def _why_none(template: Template | None) -> str:
    if template is None:
        return f"needs {KEY}, which tells answers from questions: {', '.join(templates())}, …"
    return (
        "the template marks no answer; write {% generation %} before it and {% endgeneration %} "
        "after it"
    )


class GivenTokenizer(NamedTuple):
    """A tokenizer that a run uses instead of training one."""

    path: str
    """Its file, or the directory that holds it."""
    words: str


def given_tokenizer(plan: Plan) -> GivenTokenizer | None:
    """The given tokenizer that the run uses; None if it trains one."""
    if plan.data.tokenizer is not None:
        return GivenTokenizer(plan.data.tokenizer, "data.tokenizer")
    directory = catalog.model_directory(plan)
    if directory is None or tokenizer_file(Path(directory)) is None:
        return None
    return GivenTokenizer(directory, "the model's own tokenizer")


def _check_codes(name: str, template: Template | None, given: str) -> None:
    if template is None or template.chat or name not in template.fields:
        fields = (
            ", ".join(template.fields)
            if template is not None and not template.chat
            else "no fields"
        )
        reason = f"the template has {fields}" if template is not None else f"needs {KEY}"
        raise PlanError(f"data.code_field = {quote(name)}: {reason}", "data.code_field")
    if given:
        raise PlanError(
            f"data.code_field = {quote(name)}: {given} is used, and its tokens stay as they are",
            "data.code_field",
        )


def _check_source(plan: Plan, entry: DatasetEntry) -> None:
    kind = entry.format
    if kind == "directory":
        files = folder(Path(entry.where), MOST_BYTES)
        kind = files.format if files is not None else None
    if entry.kind == "stdlib" or kind in ("text", "hdf5"):
        raise PlanError(
            f"{KEY} = {quote(plan.data.template)}: {quote(plan.data.source)} holds no records; "
            "expected .jsonl, .json, .csv, .tsv, .parquet, or a hub dataset",
            KEY,
        )


def _check_first(plan: Plan, entry: DatasetEntry, template: Template | None) -> None:
    """Refuse a file whose beginning the trainer would refuse: bytes that are no text, a header without the
    text column, first records that do not fit. The end of a Parquet file, which has its columns, is not read."""
    if entry.kind != "file" or entry.format not in ("text", "csv", "jsonl"):
        return
    path = Path(entry.where)
    try:
        if entry.format == "text" and _is_binary(path):
            raise PlanError(f"{path}: holds binary data, not text", "data.source")
        if entry.format != "text" and (encoding := _encoding(path)) != "utf-8":
            raise PlanError(f"{path}: is {encoding.upper()}; save it as UTF-8", "data.source")
        read = {"csv": _header, "jsonl": _first_record}.get(entry.format)
        record = read(path) if read is not None else None
    except OSError:
        return  # the trainer reports why
    if not record:
        return
    if template is not None:
        try:
            if entry.format == "csv":
                _check_columns(record, template, plan.learns_pairs)
            else:
                template.render(record)
        except RecordError as error:
            raise PlanError(f"{path}: line 1 {error}", KEY) from None
        return
    column = plan.data.text_column
    columns = record if entry.format == "csv" or column in record else _columns(path)
    if column not in columns:
        listed = advice(dict.fromkeys(columns), MODEL if has_own(plan) else "chatml")
        raise PlanError(f"{path}: no column {quote(column)}; {listed}", "data.text_column")
    value = record.get(column)
    if value is not None and not isinstance(value, str):
        raise PlanError(
            f'{path}: line 1: field "{column}" holds {printable(str(value)):.40}, expected text',
            "data.text_column",
        )


def _check_columns(columns: Mapping[str, None], template: Template, is_pair: bool) -> None:
    """Raise `RecordError` if a table lacks columns without which no row can be written."""
    wanted = (CHOSEN, REJECTED) if is_pair else template.needed
    missing = next((name for name in wanted if name not in columns), None)
    listed = ", ".join(columns)
    if missing is not None:
        raise RecordError(f'has no column "{missing}": it has {listed}')
    if template.chat and not is_pair and not is_chat(columns):
        raise RecordError(f"is no header of chats: it has {listed}, expected {', '.join(COLUMNS)}")


def advice(columns: Mapping[str, str | None], chats: str = "chatml") -> str:
    """What to set for a table with these columns, none of which is the text column; with their types, if known. `chats` is
    the template that suits the model's chats."""
    if {CHOSEN, REJECTED} <= columns.keys():
        return f"it holds preferences: set train.objective = dpo (or orpo, simpo) and {KEY}, for example to {chats}"
    if is_chat(columns):
        named = "prompt" if "prompt" in columns and chats != MODEL else chats
        return f"it holds chats ({', '.join(COLUMNS)}): set {KEY}, for example to {named}"
    listed = ", ".join(
        f"{name} ({kind})" if kind is not None else name for name, kind in columns.items()
    )
    names = templates_with_fields(columns)
    template = f"{' or '.join(names)}, or " if names else ""
    return f"set data.text_column to one of: {listed}; or {KEY} to {template}a text with {{{{ fields }}}}"


def first_record(plan: Plan) -> dict[str, Any] | None:
    """The first record of a file of JSON lines; None if it cannot be read, and of other data."""
    entry = catalog.dataset(plan)
    if entry.kind != "file" or entry.format != "jsonl":
        return None
    try:
        return _first_record(Path(entry.where))
    except OSError:
        return None


@once_per_version(16)
def _is_binary(path: Path) -> bool:
    """Whether a file of text begins with bytes that no text has."""
    with open_regular(path) as file:
        return is_binary(file.read(HEAD_BYTES))


@once_per_version(16)
def _encoding(path: Path) -> str:
    """The encoding of a file of records, by its first bytes."""
    with open_regular(path) as file:
        return encoding_of(next(first_lines(file, path.suffix.lower(), HEAD_BYTES), b""))


@once_per_version(16)
def _header(path: Path) -> dict[str, Any]:
    """The columns of a table by name, without their types; empty if the first line does not tell them."""
    with open_regular(path) as file:
        first = next(first_lines(file, path.suffix.lower(), MOST_BYTES), b"")
    line = first.decode("utf-8-sig", "replace")
    if not line.endswith("\n") or line.count('"') % 2:
        return {}
    try:
        names = next(csv.reader([line], delimiter=separator(plain_suffix(path.name), line)), [])
    except csv.Error:  # as for a cell of more than 131,072 characters
        return {}
    return dict.fromkeys(names) if all(names) and len(set(names)) == len(names) else {}


@once_per_version(16)
def _first_record(path: Path) -> dict[str, Any] | None:
    """The first line of a file, if it is a JSON object; None if not."""
    with open_regular(path) as file:
        return _object(next(first_lines(file, path.suffix.lower(), MOST_BYTES), b""))


@once_per_version(16)
def _columns(path: Path) -> tuple[str, ...]:
    """The fields of the first records of a file of JSON lines."""
    with open_regular(path) as file:
        records = map(_object, first_lines(file, path.suffix.lower(), MOST_BYTES))
        return tuple(dict.fromkeys(name for record in records for name in record or ()))


def _object(line: bytes) -> dict[str, Any] | None:
    """The JSON object of a line; None if it holds something else."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
