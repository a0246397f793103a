"""Opens the cache of a run's tokens: chooses memory or disk, and computes the cache key."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path

from memconsole.plan.catalog.folders import TABLES, plain_suffix
from memconsole.plan.plan import Plan
from memconsole.plan.templates.choice import template_of
from memconsole.units import GIB
from memconsole_trainer.data import disk_cache
from memconsole_trainer.data.sources.documents import Documents
from memconsole_trainer.data.text.blocks.held_tokens import HeldTokens
from memconsole_trainer.data.text.blocks.text_blocks import TextBlocks
from memconsole_trainer.data.text.blocks.token_cache import VERSION, TokenCache
from memconsole_trainer.data.text.tokens.marked import marked_dtype
from memconsole_trainer.data.text.tokens.tokenizer import Tokenizer

LEAST_BYTES = 1 << 20
"""The tokens of smaller texts are held in memory."""
READERS = {"csv": 2, "json": 2}
"""Version of the reader of a format, where it is not 1. With another version, tokens are made again."""


def open_cache(
    plan: Plan,
    source: Documents,
    blocks: TextBlocks,
    tokenizer: Tokenizer,
    directory: Path,
    warn: Callable[[str], None],
) -> TokenCache | HeldTokens | None:
    """The cache of `blocks`: in memory for a small text, otherwise on disk. None if the plan keeps no tokens on
    disk, or if the cache folder cannot be used.

    Tokens of files are shared by all runs of this user. A dataset on the hub may change under the same name,
    so its tokens are kept in the run's own `directory`.
    """
    most, size = plan.data.cache_gib * GIB, source.total_bytes
    if size is not None and size < LEAST_BYTES:
        return HeldTokens()
    if not most:
        return None
    files = source.hashes.files
    base = disk_cache.root() if files else directory / "tokens"
    marked = plan.data.template is not None
    dtype = marked_dtype(tokenizer.largest_id) if marked else tokenizer.dtype
    try:
        folder = base / disk_cache.key(
            VERSION, *_identity(plan, source, blocks, tokenizer), *_readers(files), *_states(files)
        )
        return TokenCache(folder, dtype, blocks.count, most, _log)
    except OSError as error:
        warn(f"tokens are not kept on disk: {base}: {error.strerror or error}")
        return None


def _identity(
    plan: Plan, source: Documents, blocks: TextBlocks, tokenizer: Tokenizer
) -> tuple[object, ...]:
    """Everything but the files that decides which tokens the blocks hold."""
    data, template = plan.data, template_of(plan)
    rows = () if template is None else (template.identity, data.sequence_length)
    return (
        metadata.version("tokenizers"),
        tokenizer.fingerprint,
        (tokenizer.begin, tokenizer.end_of_text),
        source.fingerprint,
        type(source).__name__,
        data.text_column,
        data.max_examples,
        (blocks.fraction, data.held_out),
        sorted(blocks.left_out),
        plan.learns_answers,
        data.isolate_documents,
        rows,
    )


def _readers(files: Sequence[Path]) -> list[tuple[str, int]]:
    """The formats of the files whose reader is of another version than 1."""
    formats = {TABLES.get(plain_suffix(path.name), "") for path in files}
    return sorted((name, READERS[name]) for name in formats & READERS.keys())


def _states(files: Sequence[Path]) -> list[object]:
    """Sizes and times of the files. Writing a file changes its status-change time even if the modification time
    is set back. Raises `OSError`."""
    states = [os.stat(path) for path in files]
    return [(s.st_size, s.st_mtime_ns, s.st_ctime_ns) for s in states]


def _log(line: str) -> None:
    print(f"  {line}", flush=True)
