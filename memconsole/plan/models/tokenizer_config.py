"""Reads the files beside a tokenizer: its special tokens, whether they are added, its chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from memconsole import regular_file, typed_json
from memconsole.plan.plan import PlanError

CONFIG, CHAT_TEMPLATE = "tokenizer_config.json", "chat_template.jinja"
_LIMIT = 16 << 20
"""Bytes of the largest file that is read."""


class _Special(msgspec.Struct):
    content: str


class _Named(msgspec.Struct):
    name: str
    template: str


class _Added(msgspec.Struct):
    content: str
    special: bool = False
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = False


class _Model(msgspec.Struct):
    model_type: str = ""


_Token = str | _Special | None


class TokenizerConfig(msgspec.Struct, frozen=True, omit_defaults=True):
    """A `tokenizer_config.json` as transformers writes it, with what older files keep elsewhere."""

    bos_token: _Token = None
    eos_token: _Token = None
    unk_token: _Token = None
    pad_token: _Token = None
    add_bos_token: bool | None = None
    add_eos_token: bool | None = None
    add_prefix_space: bool | None = None
    tokenizer_class: str | None = None
    model_max_length: Any = None
    chat_template: str | list[_Named] | None = None
    added_tokens_decoder: dict[str, _Added] = {}

    def token(self, name: str) -> str | None:
        """The special token `bos`, `eos`, `unk` or `pad`."""
        found = getattr(self, f"{name}_token")
        return found.content if isinstance(found, _Special) else found or None

    @property
    def template(self) -> str | None:
        """The chat template; if there are several, the one called `default`."""
        if isinstance(self.chat_template, list):
            return next((t.template for t in self.chat_template if t.name == "default"), None)
        return self.chat_template


def read(directory: Path) -> TokenizerConfig:
    """What the files in `directory` say; an empty record if there are none. Raises `PlanError`."""
    config = _decoded(directory / CONFIG, TokenizerConfig) or TokenizerConfig()
    older = _decoded(directory / "special_tokens_map.json", TokenizerConfig)
    changes: dict[str, Any] = {}
    for name in ("bos", "eos", "unk", "pad"):
        if older is not None and config.token(name) is None and older.token(name) is not None:
            changes[f"{name}_token"] = older.token(name)
    own = directory / CHAT_TEMPLATE
    if own.is_file():
        try:
            changes["chat_template"] = regular_file.read(own, _LIMIT).decode("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise _unreadable(own, error) from None
    return msgspec.structs.replace(config, **changes)


def model_type(directory: Path) -> str:
    """The `model_type` of the config.json beside it; empty if there is none."""
    found = _decoded(directory / "config.json", _Model)
    return found.model_type if found is not None else ""


def _decoded(path: Path, kind: Any) -> Any:
    if not path.is_file():
        return None
    try:
        return typed_json.decode(regular_file.read(path, _LIMIT), kind)
    except (OSError, ValueError, RecursionError) as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: Exception) -> PlanError:
    reason = getattr(error, "strerror", None) or str(error)
    return PlanError(f"{path}: cannot be read: {reason}", "data.tokenizer")
