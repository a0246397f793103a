"""The template of a plan: a named one, the model's own, a file, or a text with fields."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import msgspec

from memconsole import regular_file, typed_json
from memconsole.given_path import given_path
from memconsole.plan import catalog
from memconsole.plan.models import tokenizer_config
from memconsole.plan.models.tokenizer_file import control_tokens
from memconsole.plan.plan import Plan, PlanError, nearest, quote

if TYPE_CHECKING:
    from memconsole.plan.templates.template import Template

MODEL = "model"
"""The name of the template that lies beside the model's weights."""
KEY = "data.template"
TEMPLATE_SUFFIXES = (".jinja", ".jinja2", ".j2")
"""Suffixes of files that hold a template."""
TEMPLATE_BYTES = 1 << 20
"""A larger file is no template."""


class NamedTemplate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A template of the catalog."""

    name: str
    label: str
    text: str
    source: str


@lru_cache(maxsize=1)
def templates() -> Mapping[str, NamedTemplate]:
    """Every named template."""
    path = Path(catalog.__file__).with_name("templates.toml")
    rows = tomllib.loads(_text(path))
    return MappingProxyType(
        {
            name: typed_json.convert({"name": name, **row}, NamedTemplate)
            for name, row in rows.items()
        }
    )


def templates_with_fields(columns: Iterable[str]) -> tuple[str, ...]:
    """The named templates that write records whose fields are all among `columns`."""
    known = set(columns)
    with_fields = ((name, _compiled(row.text, ()).fields) for name, row in templates().items())
    return tuple(name for name, fields in with_fields if fields and known.issuperset(fields))


def template_of(plan: Plan) -> Template | None:
    """The plan's template, which writes pairs if the plan learns preferences; None for plain text. Raises `PlanError`."""
    name = plan.data.template
    if name is None:
        return None
    source, variables = source_of(plan)
    given = plan.data.tokenizer or catalog.model_directory(plan)
    guarded = control_tokens(given) if given is not None else None
    of_model = name == MODEL
    known, pairs = tuple(variables.items()), plan.learns_pairs
    return _compiled(source, known, guarded, plan.learns_answers, of_model, pairs)


def source_of(plan: Plan) -> tuple[str, dict[str, str]]:
    """The text of the plan's template, and the variables that it knows. Raises `PlanError`."""
    name = plan.data.template or ""
    if name != MODEL:
        return _source(name), {}
    directory = catalog.model_directory(plan)
    if directory is None:
        raise _error(name, f"{quote(plan.model.name)} has no template of its own")
    return _of_model(Path(directory))


def has_own(plan: Plan) -> bool:
    """Whether a chat template lies beside the model's weights. Raises `PlanError` for a model that is not there."""
    directory = catalog.model_directory(plan)
    try:
        return directory is not None and bool(tokenizer_config.read(Path(directory)).template)
    except PlanError:
        return False


def _source(name: str) -> str:
    """The text of a named template, of a file, or `name` itself if it has fields."""
    if name in templates():
        return templates()[name].text
    if "{{" in name or "{%" in name:
        return name
    path = given_path(name)
    if path.suffix in TEMPLATE_SUFFIXES:
        try:
            return _text(path)
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "not UTF-8 text"
            raise _error(name, reason) from None
    known = (*templates(), MODEL)
    raise _error(
        name,
        f"expected {', '.join(known)}, a file {TEMPLATE_SUFFIXES[0]}, or a text with fields like "
        f"{{{{ question }}}}{nearest(name, known)}",
    )


def _text(path: Path) -> str:
    return regular_file.read(path, TEMPLATE_BYTES).decode("utf-8")


def _of_model(directory: Path) -> tuple[str, dict[str, str]]:
    """The chat template in a model's directory, and the tokens that it may name."""
    try:
        config = tokenizer_config.read(directory)
    except PlanError as error:
        raise _error(MODEL, str(error)) from None
    if not config.template:
        raise _error(MODEL, f"{directory} holds no chat template; name one of {_names()}")
    tokens = {f"{name}_token": config.token(name) or "" for name in ("bos", "eos", "unk", "pad")}
    return config.template, tokens


@lru_cache(maxsize=8)
def _compiled(
    source: str,
    variables: tuple[tuple[str, str], ...],
    guarded: tuple[str, ...] | None = None,
    learns_answers: bool = True,
    of_model: bool = False,
    pairs: bool = False,
) -> Template:
    from memconsole.plan.templates.preference import PairTemplate
    from memconsole.plan.templates.template import (  # Jinja takes 60 ms
        Template,
        TemplateSyntaxError,
    )

    kind = PairTemplate if pairs else Template
    try:
        return kind(source, guarded, dict(variables), learns_answers, of_model)
    except TemplateSyntaxError as error:
        where = f" (line {error.lineno})" if error.lineno > 1 else ""
        raise _error(source, f"not a template{where}: {error.message}") from None
    except (RecursionError, MemoryError):
        raise _error(source, "not a template: it is nested too deeply") from None


def _names() -> str:
    return ", ".join(templates())


def _error(name: str, reason: str) -> PlanError:
    return PlanError(f"{KEY} = {quote(name)}: {reason}", KEY)
