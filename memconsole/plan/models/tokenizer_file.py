"""What the files of a given tokenizer hold, without loading a tokenizer: entries, control tokens and tags."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from memconsole import regular_file, typed_json
from memconsole.once_per_version import once_per_version
from memconsole.plan.models import sentencepiece, tokenizer_config
from memconsole.plan.models.files import SENTENCEPIECE, TOKENIZERS, VOCABULARY, tokenizer_file
from memconsole.plan.models.tokenizer_config import TokenizerConfig
from memconsole.plan.plan import PlanError, quote

END_OF_TEXT = "<|endoftext|>"
"""The token that ends a document in a tokenizer that a run trains."""
TAG = re.compile(r"<[^<>\s]{1,32}>")
"""A word like `<cause>` or `<|im_start|>`, of which templates make control tokens."""
TOKENIZER_BYTES = 256 << 20
"""The largest vocabularies in use take 35 MB; a larger file is no tokenizer."""


class _Added(msgspec.Struct):
    id: int
    content: str = ""
    special: bool = False


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[tuple[str, float]]
    """token → id (BPE, WordPiece, WordLevel), or (token, score) in order of id (Unigram)."""


class _Tokenizer(msgspec.Struct):
    model: _Model
    added_tokens: list[_Added] = []


class _Contents(msgspec.Struct, frozen=True):
    """What the files of a tokenizer hold."""

    entries: int
    """One more than its largest token id."""
    vocabulary: int
    """One more than the largest id of its vocabulary, without the tokens that were added to it."""
    added: tuple[tuple[int, str], ...]
    """Ids and names of the added tokens, in order of id."""
    config: TokenizerConfig
    control: tuple[str, ...]
    """Its control tokens."""
    tags: frozenset[str]
    """Its tokens that have the form of a `TAG`."""


def tokenizer_vocab_size(path: str) -> int:
    """One more than the largest token id of a tokenizer: its file, or the directory that holds it.

    The file is read again only if it changes. Raises `PlanError`.
    """
    return _contents(path).entries


def vocabulary_size(path: str) -> int:
    """One more than the largest id of a tokenizer's vocabulary, without the tokens that were added to it. Raises
    `PlanError`."""
    return _contents(path).vocabulary


def tokens_beyond(path: str, vocab_size: int) -> tuple[str, ...]:
    """The added tokens of a tokenizer whose ids are `vocab_size` or larger; none if it cannot be read."""
    try:
        return tuple(name for index, name in _contents_of(path).added if index >= vocab_size)
    except (OSError, ValueError, RuntimeError, RecursionError):
        return ()


def around_tokens(path: str) -> tuple[str, ...]:
    """The tokens that begin and end a text, of those that a tokenizer has. Raises `PlanError`."""
    config = _contents(path).config
    return tuple(token for name in ("bos", "eos") if (token := config.token(name)) is not None)


def _contents(path: str) -> _Contents:
    try:
        return _contents_of(path)
    except PlanError:
        raise  # it names the file, which may be one beside the tokenizer
    except FileNotFoundError:
        reason = f"no such file; expected {TOKENIZERS}, or their directory"
    except OSError as error:
        reason = f"cannot be read: {error.strerror}"
    except (ValueError, RuntimeError, RecursionError):
        reason = f"not a tokenizer; expected {TOKENIZERS}, or their directory"
    raise PlanError(f"data.tokenizer = {quote(path)}: {reason}", "data.tokenizer")


def control_tokens(path: str) -> tuple[str, ...] | None:
    """The special tokens of a tokenizer; None if it cannot be read."""
    try:
        return _contents_of(path).control
    except (OSError, ValueError, RuntimeError, RecursionError):
        return None


def tag_tokens(path: str) -> frozenset[str] | None:
    """The tokens of a tokenizer that have the form of a `TAG`; None if it cannot be read."""
    try:
        return _contents_of(path).tags
    except (OSError, ValueError, RuntimeError, RecursionError):
        return None


def _contents_of(path: str) -> _Contents:
    place = Path(path).expanduser()
    file = tokenizer_file(place) if place.is_dir() else place
    if file is None:
        raise FileNotFoundError
    return _read_file(file)


class _Entries(NamedTuple):
    """What one of the forms of a tokenizer's file holds."""

    largest: int
    """The largest id; -1 if there is none."""
    names: Iterable[str]
    control: Sequence[str] = ()
    """Control tokens."""
    added: dict[int, str] | None = None
    """Tokens that were added to the vocabulary. If the file lists them, its control tokens are among them, whatever the
    configuration beside it says."""


@once_per_version(16)
def _read_file(file: Path) -> _Contents:
    config = tokenizer_config.read(file.parent)
    content = regular_file.read(file, TOKENIZER_BYTES)
    if file.name.endswith(Path(SENTENCEPIECE).suffix):
        entries = _sentencepiece_entries(content)
    elif file.name == VOCABULARY:
        entries = _vocabulary_entries(content)
    else:
        entries = _tokenizer_json_entries(content)
    decoder = config.added_tokens_decoder
    named = [config.token(name) for name in ("bos", "eos", "unk", "pad")]
    of_config = [token for token in named if token is not None]
    of_config += [token.content for token in decoder.values() if token.special]
    control = [*of_config, *entries.control] if entries.added is None else entries.control
    added = {int(i): token.content for i, token in decoder.items() if i.isdecimal()}
    added |= entries.added or {}
    largest = max((entries.largest, *added))
    if largest < 0:
        raise ValueError("empty vocabulary")
    names = itertools.chain(of_config, entries.names, added.values())
    return _Contents(
        entries=largest + 1,
        vocabulary=entries.largest + 1,
        added=tuple(sorted(added.items())),
        config=config,
        control=tuple(dict.fromkeys(token for token in control if token)),
        tags=frozenset(name for name in names if name[:1] == "<" and TAG.fullmatch(name)),
    )


def _sentencepiece_entries(content: bytes) -> _Entries:
    pieces = sentencepiece.parse(content).pieces
    control = [piece.text for piece in pieces if piece.kind == sentencepiece.CONTROL]
    return _Entries(len(pieces) - 1, [piece.text for piece in pieces], control)


def _vocabulary_entries(content: bytes) -> _Entries:
    ids = typed_json.decode(content, dict[str, int])
    return _Entries(max(ids.values(), default=-1), ids)


def _tokenizer_json_entries(content: bytes) -> _Entries:
    tokenizer = typed_json.decode(content, _Tokenizer)
    vocab = tokenizer.model.vocab
    ids = vocab.values() if isinstance(vocab, dict) else range(len(vocab))
    return _Entries(
        max(ids, default=-1),
        vocab if isinstance(vocab, dict) else [name for name, _ in vocab],
        [token.content for token in tokenizer.added_tokens if token.special],
        {token.id: token.content for token in tokenizer.added_tokens},
    )
