"""The event log keeps what it is given and reads whatever it meets."""

from __future__ import annotations

import os
import random
import zlib
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memconsole.runs.record.log import events
from memconsole.runs.record.log.eventline import RECORD_BYTES, decode_line, encode_line
from memconsole.runs.record.log.eventlog import WAITING_RECORDS, EventWriter
from memconsole.runs.record.log.eventreader import EventReader, segment_numbers

relaxed = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def step(number: int, loss: float | None = 1.0) -> events.Step:
    return events.Step(
        step=number,
        epoch=1,
        loss=loss,
        learning_rate=1e-3,
        gradient_norm=None,
        tokens=number,
        tokens_per_second=10.0,
        step_seconds=0.1,
    )


def written(folder: Path, count: int, segment_bytes: int = 1 << 24) -> None:
    writer = EventWriter(folder, segment_bytes=segment_bytes)
    for number in range(1, count + 1):
        assert writer.write(step(number))
    writer.close()


def steps(records: list[events.Record]) -> list[int]:
    return [record.step for record in records if isinstance(record, events.Step)]


def test_what_is_written_is_read_in_order_and_stamped(tmp_path: Path) -> None:
    writer = EventWriter(tmp_path, wall=lambda: 100.0, boot=lambda: 7.0)
    writer.write(step(1))
    writer.write(events.Sample(step=1, prompt="a\tb", text="line\nline\x1b[31m"), durable=True)
    first, second = EventReader(tmp_path).read()
    assert (first.sequence, first.time_wall, first.time_boot) == (1, 100.0, 7.0)
    assert isinstance(second, events.Sample)
    assert second.text == "line\nline\x1b[31m"
    assert second.sequence == 2


def test_segments_are_private_rotate_and_are_followed(tmp_path: Path) -> None:
    reader = EventReader(tmp_path)
    assert reader.read() == []
    writer = EventWriter(tmp_path, segment_bytes=2000)
    seen: list[int] = []
    for number in range(1, 101):
        writer.write(step(number))
        if number % 7 == 0:
            seen += steps(reader.read())
    seen += steps(reader.read())
    assert seen == list(range(1, 101))
    assert len(segment_numbers(tmp_path)) > 5
    assert reader.damaged == reader.missing == 0
    for path in tmp_path.iterdir():
        assert path.stat().st_mode & 0o777 == 0o600
        assert path.stat().st_size <= 2000


def test_a_reader_continues_where_another_stood(tmp_path: Path) -> None:
    written(tmp_path, 50, segment_bytes=3000)
    first = EventReader(tmp_path)
    some = steps(first.read(max_bytes=1))
    rest = steps(EventReader(tmp_path, first.position).read())
    assert some
    assert some + rest == list(range(1, 51))


def test_a_new_writer_of_the_same_attempt_continues_the_sequence(tmp_path: Path) -> None:
    written(tmp_path, 3)
    written(tmp_path, 2)
    reader = EventReader(tmp_path)
    assert [record.sequence for record in reader.read()] == [1, 2, 3, 4, 5]
    assert reader.missing == 0


def test_a_partial_last_line_waits_for_its_end(tmp_path: Path) -> None:
    written(tmp_path, 3)
    (path,) = tmp_path.iterdir()
    content = path.read_bytes()
    reader = EventReader(tmp_path)
    seen: list[int] = []
    for end in range(0, len(content) + 1, 3):
        path.write_bytes(content[:end])
        # Written in place: the same file grows.
        seen += steps(reader.read())
    path.write_bytes(content)
    seen += steps(reader.read())
    assert seen == [1, 2, 3]
    assert reader.damaged == 0


@pytest.mark.parametrize("segment_bytes", [1 << 24, 5000])
def test_a_flipped_bit_costs_at_most_one_event_and_is_counted(
    tmp_path: Path, segment_bytes: int
) -> None:
    written(tmp_path, 200, segment_bytes)
    chance = random.Random(3)
    truth = set(range(1, 201))
    paths = sorted(tmp_path.iterdir())
    for _ in range(200):
        path = chance.choice(paths)
        content = bytearray(path.read_bytes())
        original = bytes(content)
        # Without its last newline, the last line looks like one that is still being written.
        content[chance.randrange(len(content) - 1)] ^= 1 << chance.randrange(8)
        path.write_bytes(content)
        reader = EventReader(tmp_path)
        records = reader.read()
        assert len(truth - set(steps(records))) <= 1
        assert all(isinstance(r, events.Step) and r.step in truth for r in records)
        assert reader.damaged >= 1
        path.write_bytes(original)


def test_a_newline_that_was_hit_costs_nothing(tmp_path: Path) -> None:
    written(tmp_path, 5)
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes().replace(b"\n", b"\x0b", 2))
    reader = EventReader(tmp_path)
    assert steps(reader.read()) == [1, 2, 3, 4, 5]
    assert reader.damaged == 1


def test_a_cut_or_replaced_file_repeats_nothing(tmp_path: Path) -> None:
    written(tmp_path, 20)
    (path,) = tmp_path.iterdir()
    reader = EventReader(tmp_path)
    assert len(reader.read()) == 20
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    assert reader.read() == []
    other = tmp_path / "copy"
    other.write_bytes(content)
    other.rename(path)
    assert reader.read() == []
    assert reader.damaged >= 1
    with path.open("ab") as file:
        file.write(encode_line(msgspec.structs.replace(step(21), sequence=21)))
    assert steps(reader.read()) == [21]


def test_a_repeated_line_counts_once(tmp_path: Path) -> None:
    written(tmp_path, 3)
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes() * 2)
    assert steps(EventReader(tmp_path).read()) == [1, 2, 3]


@given(
    st.lists(st.binary(max_size=200) | st.just(b"\n") | st.just(b"\r\x1b[2J\x00\t"), max_size=20)
)
@relaxed
def test_no_bytes_make_the_reader_raise(tmp_path: Path, pieces: list[bytes]) -> None:
    path = tmp_path / "events-000001.log"
    path.write_bytes(b"".join(pieces) + b"\n" + encode_line(step(5)))
    reader = EventReader(tmp_path)
    assert steps(reader.read())[-1:] == [5]
    assert reader.read() == []


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(2**70), 2**70)
        | st.floats()
        | st.text(max_size=20),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
        max_leaves=20,
    ),
    st.sampled_from(["step", "phase", "memory", "gap", "nonsense", ""]),
)
@relaxed
def test_whole_lines_of_the_wrong_shape_are_unknown(value: object, kind: str) -> None:
    try:
        payload = msgspec.json.encode({"kind": kind, "step": value, "phase": value, "count": value})
    except OverflowError:
        return
    line = b"%b\t%08x" % (payload, zlib.crc32(payload))
    decoded = decode_line(line)
    assert decoded is None or isinstance(decoded, events.Event)


def test_deep_json_and_endless_lines_are_survived(tmp_path: Path) -> None:
    deep = b"[" * 50_000 + b"]" * 50_000
    lines = b"%b\t%08x\n" % (deep, zlib.crc32(deep))
    endless = b"x" * (5 << 20) + b"\n"
    (tmp_path / "events-000001.log").write_bytes(lines + endless + encode_line(step(9)))
    reader = EventReader(tmp_path)
    assert steps(reader.read()) == [9]
    assert (reader.unknown, reader.damaged) == (1, 1)


def test_things_that_are_not_files_are_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "events-000001.log")
    (tmp_path / "secret").write_bytes(encode_line(step(1)))
    (tmp_path / "events-000002.log").symlink_to(tmp_path / "secret")
    (tmp_path / "events-000003.log").mkdir()
    written_folder = tmp_path / "events-000004.log"
    written_folder.write_bytes(encode_line(step(4)))
    assert steps(EventReader(tmp_path).read()) == [4]
    assert EventReader(tmp_path / "absent").read() == []


@given(
    st.text(st.characters(exclude_categories=()), max_size=50),
    st.floats(),
    st.floats(),
    st.integers(0, 2**60),
)
@relaxed
def test_every_event_is_one_readable_line(text: str, loss: float, rate: float, number: int) -> None:
    for event in (
        events.Sample(step=number, prompt=text, text=text * 3000),
        events.Error(cause=text, message=text, traceback=text * 3000),
        events.Evaluation(
            step=1, loss=loss, bits_per_byte=None, tokens=1, seconds=rate, metrics={text: loss}
        ),
        step(number, loss),
    ):
        line = encode_line(event)
        assert len(line) <= RECORD_BYTES
        assert line.count(b"\n") == 1
        decoded = decode_line(line[:-1])
        assert isinstance(decoded, type(event) | events.Warning)


def test_a_loss_that_is_not_finite_reads_as_none(tmp_path: Path) -> None:
    writer = EventWriter(tmp_path)
    writer.write(step(1, float("nan")))
    (record,) = EventReader(tmp_path).read()
    assert isinstance(record, events.Step)
    assert record.loss is None


def test_secrets_never_reach_the_log(tmp_path: Path) -> None:
    writer = EventWriter(tmp_path, secrets=['se"cret-value'])
    writer.write(events.Error(cause="crashed", message='token=se"cret-value!', traceback=""))
    content = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert b"cret-value" not in content
    (record,) = EventReader(tmp_path).read()
    assert isinstance(record, events.Error)
    assert record.message == "token=[redacted]!"


def test_a_jumping_clock_is_told_once(tmp_path: Path) -> None:
    now = {"wall": 1000.0, "boot": 10.0}
    writer = EventWriter(tmp_path, wall=lambda: now["wall"], boot=lambda: now["boot"])
    writer.write(step(1))
    now["wall"] -= 3600
    writer.write(step(2))
    now["wall"] += 1
    now["boot"] += 1
    writer.write(step(3))
    warnings = [r for r in EventReader(tmp_path).read() if isinstance(r, events.Warning)]
    assert [w.message for w in warnings] == ["the wall clock jumped by -3600 s"]


@pytest.mark.parametrize("last", [8, 300])
def test_a_refusing_disk_loses_few_records_of_many_and_counts_them(
    last: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = EventWriter(tmp_path)
    writer.write(step(1))
    real = os.write
    room = {"left": 30}

    def cramped(descriptor: int, content: bytes) -> int:
        if room["left"] <= 0:
            raise OSError(28, "No space left on device")
        size = min(len(content), room["left"])
        room["left"] -= size
        return real(descriptor, content[:size])

    monkeypatch.setattr(os, "write", cramped)
    assert not writer.write(step(2))
    assert not writer.write(events.Phase(phase="checkpoint"), durable=True)
    for number in range(3, last):
        assert not writer.write(step(number))
    assert not writer.settled()
    room["left"] = 1 << 30
    assert writer.write(step(last))
    assert writer.settled()
    reader = EventReader(tmp_path)
    records = reader.read()
    lost = WAITING_RECORDS if last > WAITING_RECORDS else 0
    assert steps(records) == [1, *range(2 + lost, last + 1)]
    assert [r.phase for r in records if isinstance(r, events.Phase)] == ["checkpoint"]
    assert reader.missing == lost
    told = [r.message for r in records if isinstance(r, events.Warning)]
    words = f"{lost} events could not be written: No space left on device"
    assert told == ([words] if lost else [])
