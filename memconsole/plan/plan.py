"""The settings of one run: what they are called, what they allow, and plans with some of them changed.

A setting is addressed by its dotted key, such as ``train.batch_size``. Every error is one line. `plan_file` reads and
writes plans.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from operator import attrgetter
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from memconsole import typed_json
from memconsole.plan.errors import PlanError, printable, quote
from memconsole.plan.sections import BACKENDS, Plan
from memconsole.plan.sections.data import DataChoice
from memconsole.plan.sections.device import DeviceChoice
from memconsole.plan.sections.hybrid import HybridChoice
from memconsole.plan.sections.launching import LaunchChoice
from memconsole.plan.sections.model import ModelChoice
from memconsole.plan.sections.optimize import (
    BaseStorage,
    Checkpointing,
    OptimizeChoice,
    OptimizerName,
    OptimizerOffload,
    Precision,
    Sharding,
)
from memconsole.plan.sections.section import Section
from memconsole.plan.sections.train import Schedule, TrainChoice
from memconsole.plan.sections.words import meant
from memconsole.sanitize import utf8

__all__ = [
    "BACKENDS",
    "SECTIONS",
    "SETTINGS",
    "BaseStorage",
    "Checkpointing",
    "DataChoice",
    "DeviceChoice",
    "HybridChoice",
    "LaunchChoice",
    "ModelChoice",
    "OptimizeChoice",
    "OptimizerName",
    "OptimizerOffload",
    "Plan",
    "PlanError",
    "Precision",
    "Schedule",
    "Setting",
    "Sharding",
    "TrainChoice",
    "apply_settings",
    "command_line",
    "get",
    "installed_backends",
    "nearest",
    "parse_value",
    "printable",
    "quote",
    "replace",
    "written",
]


class Setting(msgspec.Struct, frozen=True):
    """One key of the plan file, as described to users."""

    key: str
    default: Any
    type: Any
    """The annotated Python type, for `msgspec.convert`."""
    expects: str
    """What is allowed, in words."""
    help: str
    choices: tuple[str, ...] = ()
    optional: bool = False
    holds: type = str
    """bool, int, float or str."""


SECTIONS: dict[str, type[Section]] = {
    "model": ModelChoice,
    "data": DataChoice,
    "device": DeviceChoice,
    "train": TrainChoice,
    "optimize": OptimizeChoice,
    "hybrid": HybridChoice,
    "launch": LaunchChoice,
}
"""The tables of a plan file."""


def _describe(key: str, annotated: Any, default: Any) -> Setting:
    inner, meta = get_args(annotated)
    arguments = get_args(inner)
    optional = type(None) in arguments
    choices = tuple(arguments) if isinstance(default, str) and arguments and not optional else ()
    base = next(a for a in arguments if a is not type(None)) if optional else inner
    if choices:
        base = str
    limits = meta
    if get_origin(base) is Annotated:
        base, limits = get_args(base)
    if choices:
        expects = " | ".join(choices)
    else:
        words = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
        expects = words[base]
        expects += _range(limits)
        if optional:
            expects += ", or none"
    return Setting(
        key, default, annotated, expects, meta.description or "", choices, optional, base
    )


def _range(limits: Meta) -> str:
    """`` >= 1 and <= 8``, `` > 0``: the limits of a number."""

    def shown(limit: float) -> str:
        return f"{limit:,}" if isinstance(limit, int) else f"{limit:g}"

    signs = ((">=", limits.ge), (">", limits.gt), ("<=", limits.le), ("<", limits.lt))
    given = [f"{sign} {shown(limit)}" for sign, limit in signs if limit is not None]
    return f" {' and '.join(given)}" if given else ""


def _build_settings() -> dict[str, Setting]:
    hints = get_type_hints(Plan, include_extras=True)
    settings = {"backend": _describe("backend", hints["backend"], "torch")}
    for section, struct in SECTIONS.items():
        hints = get_type_hints(struct, include_extras=True)
        for field in msgspec.structs.fields(struct):
            key = f"{section}.{field.name}"
            settings[key] = _describe(key, hints[field.name], field.default)
    return settings


SETTINGS: dict[str, Setting] = _build_settings()
"""Every key of the plan file, in file order."""


def installed_backends() -> tuple[str, ...]:
    """`torch`, `jax` and the entry points that other packages register as `memconsole.backends`."""
    from importlib.metadata import entry_points

    extra = {e.name for e in entry_points(group="memconsole.backends")} - set(BACKENDS)
    return BACKENDS + tuple(sorted(extra))


MOST_MEANT = 4
"""The most settings that are offered for an unknown key."""


FORMER_WORDS = {"optimize.base_storage": {"bf16": "none"}}
"""Words that plan files written by earlier versions hold, by key, each with the word of today."""


def nearest(word: str, allowed: Iterable[str]) -> str:
    """`` — did you mean "x"?`` or nothing: the shortest of `allowed` that begins with `word`, else the most
    similar."""
    names = list(allowed)
    longer = [name for name in names if len(word) > 1 and name.startswith(word)]
    close = sorted(longer, key=len) or difflib.get_close_matches(word[:100], names, n=1, cutoff=0.6)
    return f' — did you mean "{close[0]}"?' if close else ""


def parse_value(key: str, text: str) -> Any:
    """The value of one ``--set key=text``, typed by the key.

    Raises `PlanError` for an unknown key or a value the key does not take.
    """
    setting = _setting(key)
    word = text.strip()
    if setting.optional and word.lower() in ("none", ""):
        return None
    return _convert(setting, word if setting.holds is str else _literal(word))


def _literal(word: str) -> Any:
    """A number or boolean as a user types it; anything else stays text."""
    if word.lower() in ("true", "false"):
        return word.lower() == "true"
    for number in (int, float):
        try:
            return number(word)
        except ValueError:
            continue
    return word


def get(plan: Plan, key: str) -> Any:
    """The value of a dotted key."""
    return _reader(key)(plan)


@cache
def _reader(key: str) -> Callable[[Plan], Any]:
    """Reads the value of a dotted key. Raises `PlanError` for one that is unknown."""
    return attrgetter(_setting(key).key)


def replace(plan: Plan, changes: Mapping[str, Any]) -> Plan:
    """A plan with dotted keys changed, each value checked. Raises `PlanError`.

    Weights belong to a model: another `model.name` or `model.decoder` has its own, unless
    `model.weights` is changed too.
    """
    by_section: dict[str, dict[str, Any]] = {}
    top: dict[str, Any] = {}
    for key, value in changes.items():
        setting = _setting(key)
        converted = None if value is None and setting.optional else _convert(setting, value)
        section, _, name = key.rpartition(".")
        if section:
            by_section.setdefault(section, {})[name] = converted
        else:
            top[name] = converted
    model = by_section.get("model", {})
    named = model.keys() & {"name", "decoder"}
    if any(getattr(plan.model, key) != model[key] for key in named):
        model.setdefault("weights", None)
    for section, fields in by_section.items():
        top[section] = msgspec.structs.replace(getattr(plan, section), **fields)
    changed: Plan = msgspec.structs.replace(plan, **top)
    return changed


def uncompiled(plan: Plan) -> Plan:
    """`plan` without compiled blocks; `plan` itself if it has none."""
    return replace(plan, {"optimize.compile": False}) if plan.optimize.compile else plan


def apply_settings(plan: Plan, assignments: Iterable[str]) -> Plan:
    """Apply ``key=value`` texts in order. Raises `PlanError`."""
    return replace(plan, dict(parse_assignments(assignments)))


def parse_assignments(assignments: Iterable[str]) -> list[tuple[str, Any]]:
    """The keys and typed values of ``key=value`` texts. Raises `PlanError`."""
    parsed: list[tuple[str, Any]] = []
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals:
            raise PlanError(f"{quote(assignment)} is not key=value, such as train.batch_size=8")
        parsed.append((key.strip(), parse_value(key.strip(), text)))
    return parsed


def command_line(plan: Plan) -> list[str]:
    """The ``--set`` arguments that turn the default plan into this one."""
    arguments: list[str] = []
    default = Plan()
    for key in SETTINGS:
        value = get(plan, key)
        if value != get(default, key):
            arguments += ["--set", f"{key}={written(value)}"]
    return arguments


def written(value: Any) -> str:
    """A setting's value as `parse_value` reads it."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return str(value)


def _setting(key: str) -> Setting:
    if key in SETTINGS:
        return SETTINGS[key]
    raise PlanError(f"unknown key {quote(key)}{hint(key) or f'; allowed: {_allowed(key)}'}", key)


def hint(key: str) -> str:
    """`` — did you mean "x"?`` with the settings that an unknown `key` most likely names, or nothing.

    They are found by the last part, by what people call them, by a word of their name, and by the spelling.
    """
    last = key.rpartition(".")[2]
    names = {k: k.rpartition(".")[2] for k in SETTINGS}
    called = [*meant(key, SETTINGS), *(k for k, name in names.items() if last in name.split("_"))]
    keys = [k for k, name in names.items() if name == last] or list(dict.fromkeys(called))
    if not keys:
        return nearest(key, SETTINGS)
    *others, final = [f'"{k}"' for k in keys[:MOST_MEANT]]
    return f" — did you mean {', '.join(others)}{' or ' if others else ''}{final}?"


def _allowed(key: str) -> str:
    """The keys of the section that `key` is in, or all sections."""
    section = key.partition(".")[0]
    inside = [k for k in SETTINGS if k.startswith(f"{section}.")]
    return ", ".join(inside or ["backend", *(f"{name}.…" for name in SECTIONS)])


def _convert(setting: Setting, value: Any) -> Any:
    value = FORMER_WORDS.get(setting.key, {}).get(value, value) if isinstance(value, str) else value
    if setting.key == "backend":
        allowed = BACKENDS if value in BACKENDS else installed_backends()
        if value not in allowed:
            hint = nearest(value, allowed) if isinstance(value, str) else ""
            raise PlanError(
                f"backend = {quote(value)}: expected {' | '.join(allowed)}{hint}", "backend"
            )
        return value
    if isinstance(value, str) and not setting.choices and value != utf8(value):
        raise PlanError(
            f"{setting.key} = {quote(value)}: expected UTF-8; rename the file or the folder",
            setting.key,
        )
    try:
        wanted = float(value) if setting.holds is float and type(value) is int else value
        if setting.holds is int and isinstance(value, float) and value.is_integer():
            wanted = int(value)  # 1e9 is how people write large whole numbers
        if type(value) is bool and setting.holds is not bool:
            raise msgspec.ValidationError("bool is not a number")
        if isinstance(wanted, float) and not math.isfinite(wanted):
            raise msgspec.ValidationError("not finite")
        if isinstance(wanted, str) and not wanted.isprintable():
            raise msgspec.ValidationError("control characters")
        return typed_json.convert(wanted, setting.type, strict=True)
    except (msgspec.ValidationError, OverflowError):
        hint = nearest(value, setting.choices) if isinstance(value, str) else ""
        raise PlanError(
            f"{setting.key} = {quote(value)}: expected {setting.expects}{hint}", setting.key
        ) from None
