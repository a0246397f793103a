"""Makes a tokenizer from the files of a model: tokenizer.json, SentencePiece, or vocabulary and merges.

The library `tokenizers` runs all of them. Tokenizers made from the older forms give the same ids as the
original libraries.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from memconsole import regular_file, typed_json
from memconsole.plan.models import sentencepiece, tokenizer_config
from memconsole.plan.models.files import (
    MERGES,
    SENTENCEPIECE,
    TOKENIZERS,
    VOCABULARY,
    tokenizer_file,
)
from memconsole.plan.models.sentencepiece import Piece, SentencePiece
from memconsole.plan.models.tokenizer_config import TokenizerConfig
from memconsole.plan.models.tokenizer_file import TOKENIZER_BYTES
from memconsole.plan.plan import PlanError

SPACE = "▁"
"""SentencePiece's sign of a space."""
_QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Qwen cuts a text into words (transformers, `Qwen2Tokenizer`)."""
_PROBE = "a"
_IN_TEXT = (sentencepiece.NORMAL, sentencepiece.USER_DEFINED, sentencepiece.BYTE)
"""Kinds of pieces that a text can consist of."""
_NEVER = -10_000.0
"""The score of all other pieces in a Unigram model, so low that any known characters are more likely."""


def read(path: Path) -> tuple[Any, TokenizerConfig]:
    """The tokenizer of a file or a directory, and the configuration beside it. Raises `PlanError`."""
    file = tokenizer_file(path) if path.is_dir() else path
    if file is None or not file.is_file():
        raise PlanError(
            f'data.tokenizer = "{path}": no such tokenizer; expected {TOKENIZERS}, or their directory',
            "data.tokenizer",
        )
    config = tokenizer_config.read(file.parent)
    try:
        inner = _made(file, config)
        _add_special(inner, config)
        _follow(inner, config)
    except PlanError:
        raise
    except Exception as error:  # noqa: BLE001 (the library raises plain exceptions)
        raise PlanError(f"{file}: not a tokenizer: {error}", "data.tokenizer") from None
    return inner, config


def within(
    inner: Any, config: TokenizerConfig, vocab_size: int
) -> tuple[Any, TokenizerConfig, tuple[str, ...]]:
    """The tokenizer and its configuration without the added tokens whose ids are `vocab_size` or larger, and the names
    of these."""
    import tokenizers

    added = inner.get_added_tokens_decoder()
    beyond = tuple(added[i].content for i in sorted(added) if i >= vocab_size)
    if not beyond:
        return inner, config, ()
    document = msgspec.json.decode(inner.to_str())
    document["added_tokens"] = [t for t in document["added_tokens"] if t["id"] < vocab_size]
    smaller = tokenizers.Tokenizer.from_str(msgspec.json.encode(document).decode())
    return smaller, config.without(beyond), beyond


def _made(file: Path, config: TokenizerConfig) -> Any:
    import tokenizers

    content = regular_file.read(file, TOKENIZER_BYTES)
    if file.name.endswith(Path(SENTENCEPIECE).suffix):
        return converted(sentencepiece.parse(content), config)
    if file.name == VOCABULARY:
        return _of_merges(file, typed_json.decode(content, dict[str, int]), config)
    return tokenizers.Tokenizer.from_buffer(content)


def _of_merges(file: Path, vocabulary: dict[str, int], config: TokenizerConfig) -> Any:
    """Byte-level BPE, as GPT-2 (Radford et al. 2019, §2.2) and Qwen store it."""
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers

    kind = (config.tokenizer_class or tokenizer_config.model_type(file.parent)).lower()
    if not kind.startswith(("gpt2", "qwen")):
        raise PlanError(
            f"{file}: how {kind or 'this model'} cuts a text into words is not known; expected "
            "tokenizer.json, or the vocabulary of GPT-2 or Qwen",
            "data.tokenizer",
        )
    lines = regular_file.read(file.with_name(MERGES), TOKENIZER_BYTES).decode("utf-8").split("\n")
    rules = [line for line in lines if line and not line.startswith("#version")]
    merges = [(a, b) for a, _, b in (rule.partition(" ") for rule in rules)]
    inner = tokenizers.Tokenizer(models.BPE(vocabulary, merges))
    inner.decoder = decoders.ByteLevel()
    if kind.startswith("qwen"):
        inner.normalizer = normalizers.NFC()
        words = pre_tokenizers.Split(tokenizers.Regex(_QWEN_WORDS), "isolated")
        level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        inner.pre_tokenizer = pre_tokenizers.Sequence([words, level])
    else:
        space = bool(config.add_prefix_space)
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=space)
    return inner


def converted(model: SentencePiece, config: TokenizerConfig) -> Any:
    """A SentencePiece model as a tokenizer of the library `tokenizers`."""
    import tokenizers
    from tokenizers import decoders, models, normalizers

    texts = [piece.text for piece in model.pieces]
    if model.kind == sentencepiece.BPE:
        ids = {text: i for i, text in enumerate(texts)}
        computed: Any = models.BPE(
            ids,
            _merges(model.pieces, ids),
            unk_token=texts[model.unknown],
            fuse_unk=True,
            byte_fallback=model.byte_fallback,
        )
    else:
        scored = [(p.text, p.score if p.kind in _IN_TEXT else _NEVER) for p in model.pieces]
        computed = models.Unigram(scored, model.unknown, byte_fallback=model.byte_fallback)
    inner = tokenizers.Tokenizer(computed)
    rules: list[Any] = []
    if model.character_map:
        rules.append(normalizers.Precompiled(model.character_map))
    if model.strips:
        rules += [normalizers.Strip(), normalizers.Replace(tokenizers.Regex(" {2,}"), " ")]
    space = SPACE if model.escapes else " "
    if model.prefix:
        rules.append(normalizers.Prepend(space))
    if model.escapes:
        rules.append(normalizers.Replace(" ", SPACE))
    if rules:
        inner.normalizer = normalizers.Sequence(rules)
    back: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if model.prefix:
        back.append(decoders.Strip(" ", 1, 0))
    inner.decoder = decoders.Sequence(back)
    for piece in model.pieces:
        if piece.kind in (sentencepiece.CONTROL, sentencepiece.UNKNOWN):
            inner.add_special_tokens([tokenizers.AddedToken(piece.text, normalized=False)])
        elif piece.kind == sentencepiece.USER_DEFINED:
            whole = tokenizers.AddedToken(piece.text, normalized=not model.prefix)
            inner.add_tokens([whole])
    _begin(inner, model, config)
    return inner


def _begin(inner: Any, model: SentencePiece, config: TokenizerConfig) -> None:
    """Begin a text with its token unless the configuration says otherwise, as Llama and Gemma do."""
    known = 0 <= model.begin < len(model.pieces)
    if known and config.add_bos_token is None and config.token("bos") is None:
        _put_around(inner, model.pieces[model.begin].text, None)


def _merges(pieces: tuple[Piece, ...], ids: dict[str, int]) -> list[tuple[str, str]]:
    """The merges of a BPE model that keeps only its pieces: a piece with a higher score was merged
    earlier, and may be made of any two pieces."""
    found = []
    for piece in pieces:
        if piece.kind not in (sentencepiece.NORMAL, sentencepiece.UNUSED):
            continue
        text = piece.text
        parts = ((text[:i], text[i:]) for i in range(1, len(text)))
        known = [(a, b) for a, b in parts if a in ids and b in ids]
        known.sort(key=lambda pair: (ids[pair[0]], ids[pair[1]]))
        found += [(piece.score, pair) for pair in known]
    found.sort(key=lambda one: -one[0])
    return [pair for _, pair in found]


def _add_special(inner: Any, config: TokenizerConfig) -> None:
    """Add the special tokens of the configuration. Raises `PlanError` if the vocabulary gives a token another
    id."""
    import tokenizers

    listed = [(int(i), t) for i, t in config.added_tokens_decoder.items() if i.isdecimal()]
    for number, token in sorted(listed, key=lambda one: one[0]):
        added = tokenizers.AddedToken(
            token.content,
            single_word=token.single_word,
            lstrip=token.lstrip,
            rstrip=token.rstrip,
            normalized=token.normalized,
        )
        present = inner.get_added_tokens_decoder().get(number)
        if present is None or present.content != token.content:
            (inner.add_special_tokens if token.special else inner.add_tokens)([added])
        if inner.token_to_id(token.content) != number:
            found = inner.token_to_id(token.content)
            raise PlanError(
                f"{tokenizer_config.CONFIG}: says that {token.content} is token {number:,}, "
                f"but the vocabulary says that it is {found}",
                "data.tokenizer",
            )
    named = [config.token(name) for name in ("bos", "eos", "unk", "pad")]
    special = {t.content for t in inner.get_added_tokens_decoder().values() if t.special}
    for name in named:
        if name is not None and name not in special and inner.token_to_id(name) is not None:
            inner.add_special_tokens([tokenizers.AddedToken(name, normalized=False)])


def around(inner: Any) -> tuple[list[int], list[int]]:
    """The tokens that the tokenizer puts before and after a text."""
    plain = inner.encode(_PROBE, add_special_tokens=False).ids
    whole = inner.encode(_PROBE, add_special_tokens=True).ids
    for start in range(len(whole) - len(plain) + 1):
        if whole[start : start + len(plain)] == plain:
            return whole[:start], whole[start + len(plain) :]
    return [], []


def _follow(inner: Any, config: TokenizerConfig) -> None:
    """Add the begin and end tokens that the configuration asks for, unless the file adds them itself."""
    if config.add_bos_token is None and config.add_eos_token is None:
        return
    before, after = around(inner)
    begin = config.token("bos") if config.add_bos_token else None
    end = config.token("eos") if config.add_eos_token else None
    if config.add_bos_token is None:
        begin = inner.id_to_token(before[0]) if before else None
    wanted = [[inner.token_to_id(t)] if t is not None else [] for t in (begin, end)]
    if [before, after] != wanted:
        _put_around(inner, begin, end)


def _put_around(inner: Any, begin: str | None, end: str | None) -> None:
    from tokenizers import processors

    both = [token for token in (begin, end) if token is not None]
    single = " ".join([*([begin] if begin else []), "$A", *([end] if end else [])])
    inner.post_processor = processors.TemplateProcessing(
        single=single,
        pair=f"{single} $B",
        special_tokens=[(token, inner.token_to_id(token)) for token in dict.fromkeys(both)],
    )
