"""Reads the files beside a tokenizer: its special tokens, whether they are added, its chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from memconsole import regular_file, typed_json
from memconsole.plan.models.files import TOKENIZER_JSON
from memconsole.plan.plan import PlanError

CONFIG, CHAT_TEMPLATE = "tokenizer_config.json", "chat_template.jinja"
SPECIAL = "special_tokens_map.json"
ADDED = "added_tokens.json"
"""The ids of added tokens in folders of older versions of transformers."""
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


def _content(token: Any) -> str | None:
    """The text of a token, which files write alone or with its properties."""
    if isinstance(token, _Special):
        return token.content
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) and text else None


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
    padding_side: str | None = None
    truncation_side: str | None = None
    additional_special_tokens: Any = None
    extra_special_tokens: Any = None
    chat_template: str | list[_Named] | None = None
    added_tokens_decoder: dict[str, _Added] = {}

    def token(self, name: str) -> str | None:
        """The special token `bos`, `eos`, `unk` or `pad`."""
        return _content(getattr(self, f"{name}_token"))

    @property
    def more_special(self) -> dict[str, list[str] | dict[str, str]]:
        """The special tokens beside those of `token`, by the name under which all versions of transformers read them:
        a list, or the token of each name."""
        special = self.extra_special_tokens or self.additional_special_tokens
        if isinstance(special, dict):
            named = {name: text for name, token in special.items() if (text := _content(token))}
            return {"extra_special_tokens": named} if named else {}
        tokens = special if isinstance(special, list) else ()
        listed = [text for token in tokens if (text := _content(token))]
        return {"additional_special_tokens": listed} if listed else {}

    def without(self, names: tuple[str, ...]) -> TokenizerConfig:
        """The configuration without the added tokens `names`."""
        more: dict[str, Any] = dict.fromkeys(("additional_special_tokens", "extra_special_tokens"))
        for key, tokens in self.more_special.items():
            if isinstance(tokens, dict):
                more[key] = {name: token for name, token in tokens.items() if token not in names}
            else:
                more[key] = [token for token in tokens if token not in names]
        added = {i: t for i, t in self.added_tokens_decoder.items() if t.content not in names}
        return msgspec.structs.replace(self, added_tokens_decoder=added, **more)

    @property
    def template(self) -> str | None:
        """The chat template; if there are several, the one called `default`."""
        if isinstance(self.chat_template, list):
            return next((t.template for t in self.chat_template if t.name == "default"), None)
        return self.chat_template


def read(directory: Path) -> TokenizerConfig:
    """What the files in `directory` say; an empty record if there are none. Raises `PlanError`."""
    config = _decoded(directory / CONFIG, TokenizerConfig) or TokenizerConfig()
    older = _decoded(directory / SPECIAL, TokenizerConfig)
    changes: dict[str, Any] = {}
    for name in ("bos", "eos", "unk", "pad"):
        if older is not None and config.token(name) is None and older.token(name) is not None:
            changes[f"{name}_token"] = older.token(name)
    if older is not None and not config.more_special:
        changes["additional_special_tokens"] = older.additional_special_tokens
    config = msgspec.structs.replace(config, **changes)
    added = None
    if not config.added_tokens_decoder and not (directory / TOKENIZER_JSON).is_file():
        added = _decoded(directory / ADDED, dict[str, int])
    if added:
        special = {config.token(name) for name in ("bos", "eos", "unk", "pad")}
        for tokens in config.more_special.values():
            special |= {*(tokens.values() if isinstance(tokens, dict) else tokens)}
        changes["added_tokens_decoder"] = {
            str(number): _Added(token, special=token in special) for token, number in added.items()
        }
    own = directory / CHAT_TEMPLATE
    if own.is_file():
        try:
            changes["chat_template"] = regular_file.read(own, _LIMIT).decode("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise _unreadable(own, error) from None
    return msgspec.structs.replace(config, **changes)


def model_type(directory: Path) -> str:
    """The `model_type` of the config.json beside it; empty if there is none."""
    config = _decoded(directory / "config.json", _Model)
    return config.model_type if config is not None else ""


def _decoded(path: Path, kind: Any) -> Any:
    """The JSON of a file as a value of `kind`; None if there is no such file. Raises `PlanError`."""
    if not path.is_file():
        return None
    try:
        return typed_json.decode(regular_file.read(path, _LIMIT), kind)
    except (OSError, ValueError, RecursionError) as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: Exception) -> PlanError:
    reason = getattr(error, "strerror", None) or str(error)
    return PlanError(f"{path}: cannot be read: {reason}", "data.tokenizer")
