"""What the files of a given tokenizer hold, without loading a tokenizer: entries, control tokens and tags."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

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


class _Held(msgspec.Struct, frozen=True):
    """What a tokenizer holds."""

    entries: int
    """One more than its largest token id."""
    vocabulary: int
    """One more than the largest id of its vocabulary, without the tokens that were added to it."""
    added: tuple[tuple[int, str], ...]
    """Ids and names of the added tokens, in order of id."""
    config: TokenizerConfig
    control: tuple[str, ...]
    tags: frozenset[str]
    """Its tokens that have the form of a `TAG`."""


def tokenizer_vocab_size(path: str) -> int:
    """One more than the largest token id of a tokenizer: its file, or the directory that holds it.

    The file is read again only if it changes. Raises `PlanError`.
    """
    return _readable(path).entries


def vocabulary_size(path: str) -> int:
    """One more than the largest id of a tokenizer's vocabulary, without the tokens that were added to it. Raises
    `PlanError`."""
    return _readable(path).vocabulary


def tokens_beyond(path: str, vocab_size: int) -> tuple[str, ...]:
    """The added tokens of a tokenizer whose ids are `vocab_size` or larger; none if it cannot be read."""
    try:
        return tuple(name for index, name in _of(path).added if index >= vocab_size)
    except (OSError, ValueError, RuntimeError, RecursionError):
        return ()


def around_tokens(path: str) -> tuple[str, ...]:
    """The tokens that begin and end a text, of those that a tokenizer has. Raises `PlanError`."""
    config = _readable(path).config
    return tuple(token for name in ("bos", "eos") if (token := config.token(name)) is not None)


def _readable(path: str) -> _Held:
    try:
        return _of(path)
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
        return _of(path).control
    except (OSError, ValueError, RuntimeError, RecursionError):
        return None


def tag_tokens(path: str) -> frozenset[str] | None:
    """The tokens of a tokenizer that have the form of a `TAG`; None if it cannot be read."""
    try:
        return _of(path).tags
    except (OSError, ValueError, RuntimeError, RecursionError):
        return None


def _of(path: str) -> _Held:
    place = Path(path).expanduser()
    file = tokenizer_file(place) if place.is_dir() else place
    if file is None:
        raise FileNotFoundError
    return _read(file)


@once_per_version(16)
def _read(file: Path) -> _Held:
    config = tokenizer_config.read(file.parent)
    named = (config.token(name) for name in ("bos", "eos", "unk", "pad"))
    control = [token for token in named if token is not None]
    decoder = config.added_tokens_decoder
    control += [token.content for token in decoder.values() if token.special]
    added = {int(i): token.content for i, token in decoder.items() if i.isdecimal()}
    names: list[Iterable[str]] = [control]
    content = regular_file.read(file, TOKENIZER_BYTES)
    if file.name.endswith(Path(SENTENCEPIECE).suffix):
        pieces = sentencepiece.parse(content).pieces
        control += [p.text for p in pieces if p.kind == sentencepiece.CONTROL]
        names.append(p.text for p in pieces)
        largest = len(pieces) - 1
    elif file.name == VOCABULARY:
        entries = typed_json.decode(content, dict[str, int])
        largest = max(entries.values(), default=-1)
        names.append(entries)
    else:
        tokenizer = typed_json.decode(content, _Tokenizer)
        vocab = tokenizer.model.vocab
        ids = vocab.values() if isinstance(vocab, dict) else range(len(vocab))
        largest = max(ids, default=-1)
        control = [t.content for t in tokenizer.added_tokens if t.special]
        names += [vocab if isinstance(vocab, dict) else (name for name, _ in vocab)]
        added |= {t.id: t.content for t in tokenizer.added_tokens}
    names.append(added.values())
    if max((largest, *added)) < 0:
        raise ValueError("empty vocabulary")
    tags = (name for part in names for name in part if name[:1] == "<" and TAG.fullmatch(name))
    return _Held(
        entries=max((largest, *added)) + 1,
        vocabulary=largest + 1,
        added=tuple(sorted(added.items())),
        config=config,
        control=tuple(dict.fromkeys(token for token in control if token)),
        tags=frozenset(tags),
    )
