"""The tokenizer of a run: a byte-level BPE trained on its text, or a given one."""

from __future__ import annotations

import array
import functools
import hashlib
import os
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from memconsole.plan.machine.processor import process_cpus
from memconsole.plan.models import tokenizer_config
from memconsole.plan.models.tokenizer_config import TokenizerConfig
from memconsole.plan.models.tokenizer_file import END_OF_TEXT, TOKENIZER_BYTES
from memconsole.plan.plan import PlanError
from memconsole.regular_file import read as read_regular
from memconsole.runs.record.files import write_atomic
from memconsole_trainer.data.text.tokens import tokenizer_files

_END_MARKS = (END_OF_TEXT, "<|end_of_text|>", "<eos>", "</s>", "<|im_end|>", "[SEP]")
"""Names of the end-of-document token in common tokenizers, most specific first."""

UNKNOWN = "<unk>"
"""The token of a character-level tokenizer for characters that it does not know."""
Tokens = NDArray[Any]
"""Token ids: uint16 if the vocabulary is small enough, else int32."""


class Tokenizer:
    """Converts text to token ids and back.

    `begin` are the tokens that begin a document, `end_of_text` is the one that ends it, and `pad` the
    one that fills rows; None if there is no such token. A control token's name within a text stays text.

    A text always gives the same tokens: subword regularization, which samples among the ways to cut
    a word (BPE dropout, Provilkov et al. 2020; the Unigram model's `alpha`, Kudo 2018), is off.
    """

    def __init__(self, inner: Any, config: TokenizerConfig | None = None) -> None:
        """`config` names the special tokens."""
        self._inner = inner
        self.config = TokenizerConfig() if config is None else config
        self.beyond: tuple[str, ...] = ()
        """The added tokens that were left out, because the model's vocabulary has no entries for them."""
        self.sampled = ""
        """The setting of subword regularization that was switched off, with its value."""
        for name in ("dropout", "alpha"):
            if value := getattr(inner.model, name, None):
                self.sampled = f"{name} {value:g}"
                setattr(inner.model, name, None)
        inner.no_truncation()
        inner.no_padding()
        self.vocab_size = int(inner.get_vocab_size(with_added_tokens=True))
        ids = inner.get_vocab(with_added_tokens=True)
        self.largest_id = max(ids.values(), default=0)
        self.dtype = token_dtype(self.largest_id + 1)
        begin, end = tokenizer_files.around(inner)
        self.begin: tuple[int, ...] = tuple(begin)
        names = [self.config.token("eos"), *(inner.id_to_token(i) for i in end), *_END_MARKS]
        found = (inner.token_to_id(name) for name in names if name is not None)
        self.end_of_text: int | None = next((i for i in found if i is not None), None)
        padding = self.config.token("pad")
        self.pad: int | None = None if padding is None else inner.token_to_id(padding)
        inner.encode_special_tokens = True

    @property
    def inner(self) -> Any:
        """The tokenizer of the library `tokenizers`."""
        return self._inner

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(self._inner.to_str().encode()).hexdigest()

    def encode(self, texts: Sequence[str]) -> Tokens:
        """Encode `texts` into one array (tokens,), each with its begin and end-of-text tokens."""
        parts = self.encode_each(texts)
        return np.concatenate(parts) if parts else np.empty(0, dtype=self.dtype)

    def encode_each(self, texts: Sequence[str]) -> list[Tokens]:
        """The tokens of each text, with its begin and end-of-text tokens; none for a text without tokens of
        its own. The library's threads share the texts of one call."""
        encodings = self._inner.encode_batch_fast(list(texts), add_special_tokens=False)
        begin, end = list(self.begin), self._end
        return [as_array(begin + e.ids + end if e.ids else [], self.dtype) for e in encodings]

    @property
    def _end(self) -> list[int]:
        return [] if self.end_of_text is None else [self.end_of_text]

    def prompt(self, text: str) -> list[int]:
        """The tokens of a prompt: with begin tokens, and without an end-of-text token. For an empty text, the tokens
        after which a new document begins."""
        ids = [int(i) for i in self._inner.encode(text, add_special_tokens=False).ids]
        return [*self.begin, *ids] or self._end or [0]

    def reads_whole(self, tag: str) -> bool:
        """Whether a tag that a template writes becomes one token."""
        index = self._inner.token_to_id(tag)
        return index in self.encodings([tag], offsets=False, controls=True)[0].ids

    def stops(self, after: str = "") -> tuple[int, ...]:
        """The tokens at which generation stops: the end-of-text token, and the control token with which `after`, the
        text that follows an answer, begins."""
        first = self.encodings([after.lstrip()], controls=True)[0].ids[:1]
        return tuple(dict.fromkeys([*self._end, *(i for i in first if i in self.special_ids)]))

    def encode_measured(self, text: str) -> tuple[Tokens, NDArray[np.int32]]:
        """Encode one document, and count the UTF-8 bytes of `text` that each token covers.

        The counts add up to the bytes of the text that the tokenizer knows; the end-of-text token and
        the unknown token cover none. With a byte-level tokenizer a token covers its own bytes. With
        others it covers the text from the previous token's end to its own end, so a character made of
        several tokens counts for the first of them.
        """
        ids = self.encode([text])
        if not len(ids):
            return ids, np.empty(0, np.int32)
        begins, ends = len(self.begin), len(self._end)
        body = ids[begins : len(ids) - ends]
        size = byte_length(text)
        table = self.id_bytes
        found = np.zeros(len(body), np.int32) if table is None else table[body]
        if int(found.sum()) != size:
            found = bytes_by_offsets(text, self.encodings([text])[0].offsets)
        found[body == self.unknown] = 0
        return ids, np.concatenate([np.zeros(begins, np.int32), found, np.zeros(ends, np.int32)])

    @functools.cached_property
    def joins_spaces(self) -> bool:
        """Whether tokens hold a space and the word after it, as those of byte-level and SentencePiece tokenizers do."""
        spaces = ("\u0120", "\u2581")  # as the two write a space
        words = self._inner.get_vocab(with_added_tokens=False)
        return any(word[:1] in spaces and word.strip(word[:1]) for word in words if word)

    @functools.cached_property
    def id_bytes(self) -> NDArray[np.int32] | None:
        """Bytes that each token id represents, if the tokenizer is byte-level, else None. An added
        token has the bytes of its name."""
        from tokenizers import pre_tokenizers

        alphabet = set(pre_tokenizers.ByteLevel.alphabet())
        added = {i: token.content for i, token in self._inner.get_added_tokens_decoder().items()}
        found = np.zeros(self.largest_id + 1, np.int32)
        for token, index in self._inner.get_vocab(with_added_tokens=True).items():
            if index in added:
                found[index] = len(added[index].encode())
            elif alphabet.issuperset(token):
                found[index] = len(token)  # the alphabet has one character per byte
            else:
                return None
        return found

    @functools.cached_property
    def unknown(self) -> int | None:
        """The token of any text that the vocabulary does not hold; None if there is no such token, or if it is the
        end-of-text token too."""
        model = msgspec.json.decode(self._inner.to_str())["model"]
        name = model.get("unk_token")
        found = model.get("unk_id") if name is None else self._inner.token_to_id(name)
        return None if found == self.end_of_text else found

    @property
    def special_ids(self) -> list[int]:
        """Ids of special tokens, which represent no text."""
        tokens = self._inner.get_added_tokens_decoder()
        return [i for i, token in tokens.items() if token.special]

    def encodings(
        self, texts: Sequence[str], offsets: bool = True, *, controls: bool = False
    ) -> list[Any]:
        """Each text's ids and, if wanted, offsets in characters, without the tokens around it. With
        `controls` the names of control tokens become these tokens."""
        inner = self._with_controls if controls else self._inner
        encode = inner.encode_batch if offsets else inner.encode_batch_fast
        found: list[Any] = encode(list(texts), add_special_tokens=False)
        return found

    @functools.cached_property
    def _with_controls(self) -> Any:
        """The same tokenizer, but it turns the names of control tokens into these tokens."""
        import tokenizers

        return tokenizers.Tokenizer.from_str(self._inner.to_str())

    def continuation(
        self, prompt: Sequence[int], new: Sequence[int], stops: Collection[int] = ()
    ) -> str:
        """The text that `new` tokens add to a prompt, without an end-of-text token at its end or one
        of `stops`."""
        new = new[:-1] if len(new) and int(new[-1]) in (self.end_of_text, *stops) else new
        before = self.decode(prompt)
        whole = self.decode([*prompt, *new])
        return whole[len(before) :] if whole.startswith(before) else self.decode(new)

    def decode(self, ids: Sequence[int]) -> str:
        """Decode `ids` to text; invalid UTF-8 becomes the replacement character."""
        text: str = self._inner.decode([int(i) for i in ids], skip_special_tokens=False)
        return text

    def save(self, path: Path) -> None:
        """Write `tokenizer.json` atomically, and beside it the file that names its special tokens."""
        beside = path.with_name(tokenizer_config.CONFIG)
        write_atomic(beside, msgspec.json.format(msgspec.json.encode(self.config)))
        write_atomic(path, self._inner.to_str().encode())


def byte_length(text: str) -> int:
    """Bytes of `text` in UTF-8."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "replace"))


def bytes_by_offsets(text: str, offsets: Any) -> NDArray[np.int32]:
    """The UTF-8 bytes of `text` from each token's predecessor's end to its own end."""
    if not len(offsets):
        return np.zeros(0, np.int32)
    ends = np.maximum.accumulate(np.asarray(offsets)[:, 1])
    ends[-1] = len(text)  # text after the last token counts for that token
    sizes = [len(c.encode("utf-8", "replace")) for c in text]
    places = np.concatenate([[0], np.cumsum(sizes)])[ends]
    return np.diff(places, prepend=0).astype(np.int32)


def train(
    texts: Iterable[str],
    vocab_size: int,
    *,
    lowercase: bool = False,
    tags: Sequence[str] = (),
    codes: Sequence[str] = (),
) -> Tokenizer:
    """Train a tokenizer of at most `vocab_size` entries that can encode every string.

    Its alphabet holds all 256 bytes, so there is no unknown token (Radford et al. 2019, §2.2).
    `tags` are control tokens. Each of `codes` is one token wherever it stands as a word.
    """
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

    inner = tokenizers.Tokenizer(models.BPE())
    if lowercase:
        inner.normalizer = normalizers.Lowercase()
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(codes),
        min_frequency=2,
        special_tokens=[END_OF_TEXT, *tags],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(texts, trainer)
    inner.add_tokens([tokenizers.AddedToken(code, single_word=True) for code in codes])
    return Tokenizer(inner, TokenizerConfig(bos_token=END_OF_TEXT, eos_token=END_OF_TEXT))


def of_characters(
    texts: Iterable[str],
    vocab_size: int,
    *,
    lowercase: bool = False,
    tags: Sequence[str] = (),
    codes: Sequence[str] = (),
) -> Tokenizer:
    """A tokenizer with a token for each character of `texts`, the most frequent ones if there are
    more than fit. Other characters become one unknown token. `tags` and `codes` as in `train`."""
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers

    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(text.lower() if lowercase else text)
    marks = [END_OF_TEXT, UNKNOWN, *tags]
    room = max(0, vocab_size - len(marks) - len(codes))
    most = sorted(counts, key=lambda c: (-counts[c], c))[:room]
    names = [*marks, *sorted(most)]
    vocabulary = {name: index for index, name in enumerate(names)}
    inner = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    if lowercase:
        inner.normalizer = normalizers.Lowercase()
    inner.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    inner.add_special_tokens(marks)
    inner.add_tokens([tokenizers.AddedToken(code, single_word=True) for code in codes])
    described = TokenizerConfig(bos_token=END_OF_TEXT, eos_token=END_OF_TEXT, unk_token=UNKNOWN)
    return Tokenizer(inner, described)


def load(path: Path, vocab_size: int) -> Tokenizer:
    """Load a tokenizer from its file, or from the directory that holds it.

    Added tokens whose ids are outside the model's vocabulary are left out. Raises `PlanError` if there is no tokenizer,
    or if other ids of it are outside.
    """
    inner, config, beyond = tokenizer_files.within(*tokenizer_files.read(path), vocab_size)
    tokenizer = Tokenizer(inner, config)
    tokenizer.beyond = beyond
    largest = max((tokenizer.largest_id, *tokenizer.begin))
    if largest >= vocab_size:
        raise PlanError(
            f"{path}: has token ids up to {largest:,}, the model's vocabulary holds {vocab_size:,}",
            "data.tokenizer",
        )
    return tokenizer


def file_fingerprint(path: Path) -> str:
    """The hash of a run's `tokenizer.json`, equal to the `fingerprint` of the tokenizer that was
    saved there; empty if the file cannot be read."""
    try:
        return hashlib.sha256(read_regular(path, TOKENIZER_BYTES)).hexdigest()
    except OSError:
        return ""


def as_array(ids: list[int], dtype: Any) -> Tokens:
    """A list of ids as an array; three times as fast as NumPy's own conversion."""
    return np.frombuffer(array.array("i", ids), np.int32).astype(dtype)


def threads() -> int:
    """Threads with which the library encodes texts: as its own variables say, or one for each CPU
    of this process."""
    if os.environ.get("TOKENIZERS_PARALLELISM", "").lower() in (
        "false",
        "off",
        "f",
        "n",
        "no",
        "0",
    ):
        return 1
    wanted = os.environ.get("RAYON_NUM_THREADS", "")
    return int(wanted) if wanted.isdecimal() and int(wanted) else process_cpus()


def token_dtype(vocab_size: int) -> type[np.uint16] | type[np.int32]:
    """uint16 if it holds every id, else int32."""
    return np.uint16 if vocab_size <= 1 << 16 else np.int32
