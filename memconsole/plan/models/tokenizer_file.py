"""What a given tokenizer.json holds, without loading a tokenizer: entries and control tokens."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import msgspec

from memconsole import regular_file, typed_json
from memconsole.plan.plan import PlanError, quote

END_OF_TEXT = "<|endoftext|>"
"""The token that ends a document in a tokenizer that a run trains."""
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


def tokenizer_vocab_size(path: str) -> int:
    """One more than the largest token id of a ``tokenizer.json``.

    The file is read again only if it changes. Raises `PlanError`.
    """
    try:
        file = Path(path).expanduser()
        status = file.stat()
        return _vocab_size(file, status.st_mtime_ns, status.st_size)
    except (OSError, ValueError, RuntimeError, RecursionError) as error:
        reason = "no such file" if isinstance(error, FileNotFoundError) else "not a tokenizer.json"
        raise PlanError(
            f"data.tokenizer = {quote(path)}: {reason}; expected a file written by tokenizers",
            "data.tokenizer",
        ) from None


def control_tokens(path: str) -> tuple[str, ...]:
    """The special tokens of a ``tokenizer.json``; none if it cannot be read."""
    try:
        file = Path(path).expanduser()
        return _control_tokens(file, file.stat().st_mtime_ns)
    except (OSError, ValueError, RuntimeError, RecursionError):
        return ()


@lru_cache(maxsize=16)
def _control_tokens(file: Path, changed: int) -> tuple[str, ...]:
    tokenizer = typed_json.decode(regular_file.read(file, TOKENIZER_BYTES), _Tokenizer)
    return tuple(t.content for t in tokenizer.added_tokens if t.special and t.content)


@lru_cache(maxsize=16)
def _vocab_size(file: Path, changed: int, size: int) -> int:
    tokenizer = typed_json.decode(regular_file.read(file, TOKENIZER_BYTES), _Tokenizer)
    vocab = tokenizer.model.vocab
    ids = vocab.values() if isinstance(vocab, dict) else range(len(vocab))
    largest = max((*ids, *(token.id for token in tokenizer.added_tokens)), default=-1)
    if largest < 0:
        raise ValueError("empty vocabulary")
    return largest + 1
