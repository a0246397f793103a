"""Rows, batches and their order: complete, different each epoch, resumable after every batch."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memconsole.plan.tasks.language import MASKED
from memconsole_trainer.data import stream as stream_module
from memconsole_trainer.data.sources.split import Split
from memconsole_trainer.data.stream import BatchShape, BatchStream
from memconsole_trainer.data.text.rows.batches import TextRows, make_batch
from memconsole_trainer.data.text.rows.rows import Source, epoch_rows
from memconsole_trainer.data.text.tokens.marked import ids, learned
from memconsole_trainer.data.text.tokens.tokenizer import Tokens
from memconsole_trainer.data.text.tokens.tokens import ArrayRows, row_count, windows


class Blocks:
    """Blocks of consecutive integers, some empty, so that every token names its place."""

    documents = None

    def __init__(self, sizes: list[int], length: int, stride: int, endless: bool = False) -> None:
        ends = np.cumsum([0, *sizes])
        self._blocks = [np.arange(a, b, dtype=np.uint16) for a, b in itertools.pairwise(ends)]
        self.count = None if endless else len(sizes)
        self.row_tokens = length + 1
        self.stride = stride

    def block(self, index: int) -> Tokens:
        return self._blocks[int(index)]

    together = 2

    def several(self, indices: Sequence[int]) -> list[Tokens]:
        return [self.block(index) for index in indices]

    def iterate(self, start: int) -> Iterator[Tokens]:
        yield from self._blocks[start:]


SIZES = [7, 0, 31, 2, 90, 1, 1, 44, 0, 13, 60, 5]


def brute_force_rows(tokens: int, row_tokens: int, stride: int) -> list[range]:
    rows, start, seen = [], 0, 1
    while start + 2 <= tokens and (not rows or min(start + row_tokens, tokens) > seen):
        stop = min(start + row_tokens, tokens)
        rows.append(range(start, stop))
        seen = max(seen, stop)
        start += stride
        if seen >= tokens:
            break
    return rows


@given(st.integers(0, 300), st.integers(2, 40), st.integers(1, 60))
def test_row_count_agrees_with_cutting_rows_one_by_one(tokens: int, length: int, stride: int):
    rows = brute_force_rows(tokens, length, stride)
    assert row_count(tokens, length, stride) == len(rows)
    source = ArrayRows(np.arange(tokens, dtype=np.uint16), length, stride)
    assert [source[i].tolist() for i in range(len(source))] == [list(r) for r in rows]


@given(st.lists(st.integers(0, 50), max_size=8), st.integers(2, 20), st.integers(1, 30))
def test_streamed_rows_are_the_rows_of_the_joined_blocks(
    sizes: list[int], length: int, stride: int
) -> None:
    blocks = Blocks(sizes, length - 1, stride, endless=True)
    rows = [row.tolist() for row in epoch_rows(Source(blocks), (), 1, 1, 0)]
    assert rows == [list(r) for r in brute_force_rows(sum(sizes), length, stride)]


@pytest.mark.parametrize("stride", [5, 8, 9, 30])
@pytest.mark.parametrize("window", [0, 7])
@pytest.mark.parametrize("endless", [False, True])
def test_a_stream_restored_at_any_row_yields_exactly_the_rest(
    stride: int, window: int, endless: bool
) -> None:
    def dataset() -> Any:
        return epoch_rows(Source(Blocks(SIZES, 8, stride, endless)), (), 3, 2, window)

    iterator = iter(dataset())
    rows, states = [], [json.dumps(iterator.get_state())]
    for row in iterator:
        rows.append(row.tolist())
        states.append(json.dumps(iterator.get_state()))
    assert max(map(len, states)) < 200
    for position, state in enumerate(states):
        fresh = iter(dataset())
        fresh.set_state(json.loads(state))
        rest = []
        for row in fresh:
            rest.append(row.tolist())
            if len(rest) == 3:  # restored once more along the way
                again = iter(dataset())
                again.set_state(json.loads(json.dumps(fresh.get_state())))
                rest.extend(r.tolist() for r in again)
                break
        assert rest == rows[position:]


def batches(stream: BatchStream, epochs: int) -> list[tuple[int, Any, str]]:
    """(epoch, inputs and targets or None, state) of every item of so many epochs."""
    found: list[tuple[int, Any, str]] = []
    ends = 0
    while ends < epochs:
        item = stream.next()
        ends += item.batch is None
        content = item.batch and (item.batch["inputs"].tolist(), item.batch["targets"].tolist())
        found.append((item.epoch, content, json.dumps(item.state)))
    stream.close()
    return found


@pytest.mark.parametrize("held", [False, True])
def test_batches_restored_after_any_item_are_exactly_the_rest_of_two_epochs(held: bool) -> None:
    blocks, shape = Blocks(SIZES, 8, 8), BatchShape(2, 3, 8)
    tokens = np.concatenate(list(blocks.iterate(0))) if held else None

    def stream(state: Any = None) -> BatchStream:
        return BatchStream(TextRows(blocks, 5, 16, tokens), shape, state)

    everything = batches(stream(), 2)
    assert len(everything) > 10
    for position, (_, _, state) in enumerate(everything[:-1]):
        left = 2 - sum(batch is None for _, batch, _ in everything[: position + 1])
        assert batches(stream(json.loads(state)), left) == everything[position + 1 :]


@pytest.mark.parametrize("held", [False, True])
def test_every_target_is_seen_once_an_epoch_in_another_order_each_epoch(held: bool) -> None:
    blocks, shape = Blocks(SIZES, 8, 8), BatchShape(1, 4, 8)
    tokens = np.concatenate(list(blocks.iterate(0)))
    stream = BatchStream(TextRows(blocks, 5, 16, tokens if held else None), shape)
    orders: list[list[int]] = [[], []]
    counted = [0, 0]
    while (item := stream.next()).epoch <= 2:
        if item.batch is not None:
            targets = item.batch["targets"]
            assert targets.shape == (1, 4, 8)
            orders[item.epoch - 1] += targets[targets != MASKED].tolist()
            counted[item.epoch - 1] += item.units
    stream.close()
    if held:
        assert sorted(orders[0]) == sorted(orders[1]) == list(range(1, len(tokens)))
    else:  # shuffled blocks are joined anew: all but the very first token of the epoch
        assert len(set(orders[0])) == len(orders[0]) == len(tokens) - 1
        assert len(set(orders[1])) == len(orders[1]) == len(tokens) - 1
    assert orders[0] != orders[1]
    assert counted == [len(orders[0]), len(orders[1])]


def test_another_seed_gives_another_order_and_the_same_seed_the_same() -> None:
    source = Source(Blocks(SIZES, 8, 8), np.arange(500, dtype=np.uint16))
    first, same, other = (
        [row.tolist() for row in epoch_rows(source, (), seed, 1, 0)] for seed in (1, 1, 2)
    )
    assert first == same != other
    assert sorted(first) == sorted(other)


def test_orders_too_long_to_store_are_permutations_and_resume_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = Source(Blocks(SIZES, 4, 4), np.arange(2001, dtype=np.uint16))

    def order() -> Any:
        return iter(epoch_rows(source, (), 1, 1, 0))

    stored = [row.tolist() for row in order()]
    monkeypatch.setattr("memconsole_trainer.data.text.rows.rows.STORED_PERMUTATION", 10)
    walked = order()
    computed = [row.tolist() for row in walked]
    assert sorted(computed) == sorted(stored) == [list(range(i, i + 5)) for i in range(0, 2000, 4)]
    assert computed != stored != sorted(stored) != computed
    walked.set_state({"next": 123})
    assert [row.tolist() for row in walked] == computed[123:]


def test_short_and_missing_rows_are_masked_and_inputs_precede_targets() -> None:
    shape = BatchShape(2, 2, 4)
    rows = [np.array([1, 2, 3, 4, 5]), np.array([6, 7, 8]), np.array([9, 10, 11, 12])]
    batch = make_batch(rows, shape)
    assert batch.weight == 4 + 2 + 3
    assert batch["inputs"].tolist() == [
        [[1, 2, 3, 4], [6, 7, 8, 0]],
        [[9, 10, 11, 12], [0, 0, 0, 0]],
    ]
    masked = [MASKED] * 4
    assert batch["targets"].tolist() == [
        [[2, 3, 4, 5], [7, 8, MASKED, MASKED]],
        [[10, 11, 12, MASKED], masked],
    ]
    assert batch["inputs"].dtype == batch["targets"].dtype == np.int32


def test_a_thread_that_waits_for_its_data_does_not_hold_up_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked, arrives = threading.Event(), threading.Event()

    class Waiting(Blocks):
        def block(self, index: int) -> Tokens:
            asked.set()
            arrives.wait(30)
            return super().block(index)

    monkeypatch.setattr(stream_module, "CLOSE_SECONDS", 0.1)
    stream = BatchStream(TextRows(Waiting(SIZES, 8, 8), 5, 16), BatchShape(1, 4, 8))
    assert asked.wait(30)
    began = time.monotonic()
    stream.close()
    assert time.monotonic() - began < 10
    assert stream._thread.is_alive()
    arrives.set()
    stream._thread.join(30)
    assert not stream._thread.is_alive()


def test_what_waits_for_the_device_takes_the_bytes_of_its_tokens() -> None:
    """A batch, whose inputs and targets are int32, takes four times as many where tokens have 16 bits."""
    shape = BatchShape(2, 8, 64)
    stream = BatchStream(TextRows(Blocks([20_000] * 3, 64, 64), 1, 512), shape)
    wanted = stream._queue.maxsize
    until = time.monotonic() + 30
    while stream._queue.qsize() < wanted and time.monotonic() < until:
        time.sleep(0.01)
    held = [ahead for ahead in stream._queue.queue if not isinstance(ahead, BaseException)]
    size = held[0].joined.tokens.dtype.itemsize
    assert len(held) == wanted == 512 // shape.rows
    assert sum(ahead.joined.tokens.nbytes for ahead in held) == wanted * shape.rows * 65 * size
    batch = stream.next().batch
    assert batch is not None
    assert batch["inputs"].shape == (2, 8, 64)
    stream.close()


def test_what_the_source_raises_reaches_the_loop_and_waiting_may_stop_it() -> None:
    class Broken(Blocks):
        def block(self, index: int) -> Tokens:
            raise OSError("gone")

    stream = BatchStream(TextRows(Broken(SIZES, 8, 8), 1, 0), BatchShape(1, 1, 8))
    with pytest.raises(OSError, match="gone"):
        stream.next()
    stream.close()


def test_waiting_for_data_may_be_interrupted() -> None:
    class Stop(Exception):
        pass

    def stop() -> None:
        raise Stop

    class Stuck(Blocks):
        def block(self, index: int) -> Tokens:
            released.wait()
            return super().block(index)

    released = threading.Event()
    stream = BatchStream(TextRows(Stuck(SIZES, 8, 8), 1, 0), BatchShape(1, 1, 8))
    with pytest.raises(Stop):
        stream.next(stop)
    released.set()
    stream.close()


def test_the_time_spent_waiting_for_data_is_counted_once() -> None:
    asked = threading.Event()

    class Slow(Blocks):
        def block(self, index: int) -> Tokens:
            asked.wait()
            return super().block(index)

    stream = BatchStream(TextRows(Slow(SIZES, 8, 8), 1, 0), BatchShape(1, 1, 8))
    stream.next(asked.set)  # called once it has waited for 0.2 s
    assert stream.take_waited_seconds() >= 0.19
    assert stream.take_waited_seconds() == 0.0
    stream.close()
    asked.clear()
    before = BatchStream(TextRows(Slow(SIZES, 8, 8), 1, 0), BatchShape(1, 1, 8))
    before.fill(asked.set)  # before the first step, which it does not delay
    assert before.take_waited_seconds() == 0.0
    before.close()


@given(st.integers(2, 12), st.integers(0, 30), st.integers(1, 12))
def test_windows_of_wide_rows_cover_every_target_and_stay_inside_their_row(
    row_tokens: int, more: int, stride: int
) -> None:
    width, stride = row_tokens + more, min(stride, row_tokens - 1)
    rows = np.arange(3 * width).reshape(3, width)
    cut = windows(rows, row_tokens, stride)
    assert cut.shape[1] == row_tokens
    read = ids(cut)
    assert ((read // width) == (read[:, :1] // width)).all()
    assert (np.diff(read, axis=1) == 1).all()
    targets, times = np.unique(learned(cut[:, 1:]), return_counts=True)
    assert targets.tolist() == rows[:, 1:].reshape(-1).tolist()
    assert times.max() <= -(-(row_tokens - 1) // stride)  # once if windows share no targets


@given(st.integers(2, 400), st.floats(0.001, 0.5))
def test_a_known_set_of_documents_always_has_both_kinds(count: int, fraction: float) -> None:
    mask = Split(count, fraction).held_out(0, count)
    assert 0 < mask.sum() < count


def test_the_split_is_fixed_close_to_its_share_and_the_same_in_any_block() -> None:
    split = Split(100_000, 0.05)
    whole = split.held_out(0, 100_000)
    assert 0.045 < whole.mean() < 0.055
    parts = np.concatenate([split.held_out(a, a + 1000) for a in range(0, 100_000, 1000)])
    np.testing.assert_array_equal(whole, parts)
    np.testing.assert_array_equal(whole, Split(None, 0.05).held_out(0, 100_000))
    assert not Split(100, 0.0).held_out(0, 100).any()
    assert not Split(1, 0.5).held_out(0, 1).any()
