"""Tokens kept on disk: the same tokens as those made from the text, whatever happens to the files."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memconsole.plan.plan import Plan, replace
from memconsole_trainer.data import disk_cache
from memconsole_trainer.data.sources.documents import StreamDocuments
from memconsole_trainer.data.sources.opening import open_source
from memconsole_trainer.data.sources.split import Split, split_of
from memconsole_trainer.data.text.blocks import token_cache, token_key
from memconsole_trainer.data.text.blocks.block import Facts, Made
from memconsole_trainer.data.text.blocks.packing import Cuts
from memconsole_trainer.data.text.blocks.text_blocks import TextBlocks
from memconsole_trainer.data.text.blocks.token_cache import TokenCache
from memconsole_trainer.data.text.blocks.token_key import open_cache
from memconsole_trainer.data.text.tokens.tokenizer import Tokenizer, train

MANY = 1 << 40


def block(number: int) -> Made:
    tokens = np.arange(number * 7 % 50 + 1, dtype=np.uint16) + number
    return Made(
        tokens, Facts(number + 1, 10 * number, number % 3, Cuts(number, 1, 2, 3), number, 4)
    )


def opened(folder: Path, count: int | None = 20, most: int = MANY, said: Any = None) -> TokenCache:
    return TokenCache(folder, np.uint16, count, most, (said if said is not None else []).append)


def same(cache: TokenCache, number: int) -> bool:
    kept = cache.get(number)
    assert kept is not None
    wanted = block(number)
    return (
        kept.made.tokens.tolist() == wanted.tokens.tolist()
        and kept.made.facts == wanted.facts
        and kept.source == number + 100
    )


def filled(folder: Path, numbers: Sequence[int]) -> TokenCache:
    cache = opened(folder)
    for number in numbers:
        cache.put(number, block(number), number + 100)
    return cache


def test_what_was_kept_is_read_by_this_process_and_the_next(tmp_path: Path) -> None:
    order = random.Random(1).sample(range(20), 20)
    first = filled(tmp_path / "a", order[:12])
    assert all(same(first, number) for number in order[:12])
    assert [first.get(number) for number in order[12:]] == [None] * 8
    reader = opened(tmp_path / "a")  # the first still writes
    assert all(same(reader, number) for number in order[:12])
    reader.put(order[12], block(order[12]))
    assert reader.get(order[12]) is None
    first.put(order[13], block(order[13]), order[13] + 100)
    assert same(reader, order[13])
    os.close(first._lock or 0)
    second = opened(tmp_path / "a")
    second.put(order[14], block(order[14]), order[14] + 100)
    assert all(same(second, number) for number in (*order[:12], *order[13:15]))


@pytest.mark.parametrize("name", ["index", "tokens"])
def test_whatever_is_damaged_or_torn_is_made_again_and_never_read(
    name: str, tmp_path: Path
) -> None:
    chance = random.Random(name)
    for attempt in range(40):
        folder = tmp_path / str(attempt)
        os.close(filled(folder, range(20))._lock or 0)
        content = bytearray((folder / name).read_bytes())
        if attempt % 2:
            content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        else:
            del content[chance.randrange(len(content)) :]
        (folder / name).write_bytes(content)
        cache = opened(folder)
        lost = [number for number in range(20) if cache.get(number) is None]
        assert lost
        assert all(same(cache, number) for number in range(20) if number not in lost)
        for number in lost:
            cache.put(number, block(number), number + 100)
        os.close(cache._lock or 0)
        assert all(same(opened(folder), number) for number in range(20))


def test_threads_that_keep_blocks_at_the_same_time_lose_none(tmp_path: Path) -> None:
    cache = opened(tmp_path / "a", count=400)

    def keep(numbers: range) -> None:
        for number in numbers:
            cache.put(number, block(number), number + 100)
            assert same(cache, number)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(keep, [range(first, 400, 4) for first in range(4)]))
    assert all(same(cache, number) for number in range(400))
    assert all(same(opened(tmp_path / "a", count=400), number) for number in range(400))


def test_a_full_cache_or_disk_ends_the_writing_and_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    cache = opened(tmp_path / "small", most=100, said=said)
    for number in range(20):
        cache.put(number, block(number), number + 100)
    assert cache.kept_bytes <= 100
    assert same(cache, 0)
    assert cache.get(19) is None
    assert len(said) == 1
    assert "data.cache_gib" in said[0]

    def full(descriptor: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    cache = opened(tmp_path / "full", said=said)
    cache.put(0, block(0), 100)
    with monkeypatch.context() as patch:
        patch.setattr(token_cache.os, "write", full)
        cache.put(1, block(1), 101)
    cache.put(2, block(2), 102)
    assert same(cache, 0)
    assert cache.get(1) is cache.get(2) is None
    assert len(said) == 2
    assert "No space left on device" in said[1]
    monkeypatch.setattr(disk_cache, "SPARED_BYTES", 1 << 62)
    cache = opened(tmp_path / "almost", said=said)
    cache.put(0, block(0))
    assert cache.get(0) is None
    assert "are left for checkpoints" in said[2]


def test_room_is_made_by_the_least_recently_used_that_no_process_writes(tmp_path: Path) -> None:
    for age, name in enumerate(["new", "old", "used"]):
        held = filled(tmp_path / name, range(20))
        os.utime(tmp_path / name, (1000 - age, 1000 - age))
        if name != "used":
            os.close(held._lock or 0)
    each = disk_cache.others(tmp_path / "nothing") // 3
    assert disk_cache.make_room(tmp_path / "own", each) == each
    assert sorted(p.name for p in tmp_path.iterdir()) == ["new", "used"]
    cache = opened(tmp_path / "own", most=each + 100)
    cache.put(0, block(0), 100)
    assert same(cache, 0)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["own", "used"]


def test_a_folder_that_cannot_be_written_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.close(filled(tmp_path / "a", range(20))._lock or 0)

    def refused(folder: Path) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(disk_cache, "lock", refused)
    cache = opened(tmp_path / "a")
    assert all(same(cache, number) for number in range(20))
    with pytest.raises(OSError, match="index"):
        opened(tmp_path / "b")


WORDS = ["the", "cat", "sat", "on", "a", "mat", "while", "dogs", "ran", "over", "green", "hills"]


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(token_key, "LEAST_BYTES", 0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder, chance = tmp_path / "text", random.Random(1)
    folder.mkdir()
    for number in range(12):
        words = (chance.choice(WORDS) for _ in range(110))
        (folder / f"{number:02d}.txt").write_text(" ".join(words))
    return folder


class Blocks:
    """The blocks of a plan as a run opens them, and how many texts it read for them."""

    def __init__(self, plan: Plan, tokenizer: Tokenizer | None = None) -> None:
        self.source = open_source(plan, 300)
        assert not hasattr(self.source, "rows")
        self.texts = self.source.read(0, self.source.count or 0)
        self.tokenizer = tokenizer or train(self.texts, 300)
        split = split_of(self.source, plan.data.validation_fraction)
        self.blocks = TextBlocks(self.source, split, self.tokenizer, 8, 8)
        self.said: list[str] = []
        self.blocks.cache = open_cache(
            plan, self.source, self.blocks, self.tokenizer, Path("none"), self.said.append
        )
        self.read = 0
        self._real = self.source.read
        self.source.read = self._counted  # type: ignore[method-assign]

    def _counted(self, start: int, stop: int) -> list[str]:
        self.read += stop - start
        return self._real(start, stop)

    def all(self) -> list[list[int]]:
        return [tokens.tolist() for tokens in self.blocks.iterate(0)]


def test_a_text_is_tokenized_once_until_it_the_tokenizer_or_the_split_changes(text: Path) -> None:
    plan = replace(Plan(), {"data.source": str(text), "data.validation_fraction": 0.2})
    without = Blocks(replace(plan, {"data.cache_gib": 0}))
    assert without.blocks.cache is None
    wanted = without.all()
    first = Blocks(plan)
    assert first.all() == wanted
    assert first.all() == wanted
    assert first.read == 12
    assert first.blocks.seen.documents == 2 * without.blocks.seen.documents
    again = Blocks(plan)
    assert again.all() == wanted
    assert again.read == 0
    assert again.blocks.seen == without.blocks.seen
    assert again.source.hashes.state() == without.source.hashes.state()
    others = [
        Blocks(replace(plan, {"data.validation_fraction": 0.5})),
        Blocks(plan, train(first.texts[:2], 290)),
    ]
    state = (text / "03.txt").stat()
    words = (text / "03.txt").read_text()
    (text / "03.txt").write_text(words.replace("cat", "dog"))
    os.utime(text / "03.txt", ns=(state.st_atime_ns, state.st_mtime_ns))
    others.append(Blocks(plan, first.tokenizer))
    for other in others:
        found = other.all()
        assert other.read == 12
        assert found != wanted


def test_a_small_text_is_tokenized_once_without_the_disk(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = replace(Plan(), {"data.source": str(text), "data.cache_gib": 0})
    wanted = Blocks(plan).all()
    monkeypatch.setattr(token_key, "LEAST_BYTES", 1 << 20)
    small = Blocks(plan)
    assert [small.all(), small.all()] == [wanted, wanted]
    assert small.read == 12
    assert [small.blocks.block(3).tolist()] == wanted[3:4]
    assert not (tmp_path / "cache").exists()


class Stream:
    """What `datasets` calls an IterableDataset; `read` counts the rows of all of them."""

    def __init__(self, read: list[int], count: int, first: int = 0) -> None:
        self._range, self._read = range(first, count), read

    def skip(self, number: int) -> Stream:
        return Stream(self._read, self._range.stop, self._range.start + number)

    def __iter__(self) -> Any:
        for number in self._range:
            self._read.append(number)
            yield {"text": f"text number {number}"}


def test_a_stream_is_read_once_and_a_resumed_one_from_where_the_tokens_end(
    tmp_path: Path,
) -> None:
    tokenizer = train([f"text number {i}" for i in range(300)], 300)

    def blocks(read: list[int]) -> TextBlocks:
        source = StreamDocuments(Stream(read, 300), "text", "hf://a/b", None)
        found = TextBlocks(source, Split(None, 0.1), tokenizer, 8, 8)
        found.cache = opened(tmp_path / "stream", None)
        return found

    plain = TextBlocks(
        StreamDocuments(Stream([], 300), "text", "hf://a/b", None),
        Split(None, 0.1),
        tokenizer,
        8,
        8,
    )
    wanted = [tokens.tolist() for tokens in plain.iterate(0)]
    read: list[int] = []
    stopped = blocks(read)
    walk = stopped.iterate(0)
    assert [next(walk).tolist() for _ in range(2)] == wanted[:2]
    os.close(stopped.cache._lock or 0 if stopped.cache else 0)
    kept = len(read) // 64 * 64
    assert 128 <= kept < 300
    read.clear()
    resumed = blocks(read)
    assert [tokens.tolist() for tokens in resumed.iterate(1)] == wanted[1:]
    assert read[0] == 128
    read.clear()
    assert [tokens.tolist() for tokens in resumed.iterate(0)] == wanted
    assert read == []
