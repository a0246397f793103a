"""TensorBoard files: read by a parser of their own formats, whole after a resume, and by TensorBoard where there is one."""

from __future__ import annotations

import math
import struct
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from memconsole.runs.record.directory import RunDirectory
from memconsole.runs.record.log import events
from memconsole.runs.record.run_store import create_run
from memconsole_trainer.loop.scalars import scalars
from memconsole_trainer.loop.tensorboard import (
    FOLDER,
    LARGEST,
    TensorBoard,
    _float,
    crc32c,
    record,
)
from tests.training.harness.runs import attempt, plan, told

Curves = dict[str, list[tuple[int, float]]]


@pytest.fixture(autouse=True)
def _own_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def bitwise_crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def messages() -> Any:
    """The Event message, declared field by field to Google's own protocol buffers."""
    pytest.importorskip("google.protobuf")
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(
        name="event_of_this_test.proto", package="of_this_test"
    )

    def declare(name: str, *fields: tuple[str, int, int, str]) -> None:
        message = file.message_type.add(name=name)
        for label, number, kind, of in fields:
            repeated = kinds.LABEL_REPEATED if of == "Value" else kinds.LABEL_OPTIONAL
            named = f".of_this_test.{of}" if of else None
            message.field.add(name=label, number=number, type=kind, label=repeated, type_name=named)

    declare("Value", ("tag", 1, kinds.TYPE_STRING, ""), ("simple_value", 2, kinds.TYPE_FLOAT, ""))
    declare("Summary", ("value", 1, kinds.TYPE_MESSAGE, "Value"))
    declare("SessionLog", ("status", 1, kinds.TYPE_INT32, ""))
    declare(
        "Event",
        ("wall_time", 1, kinds.TYPE_DOUBLE, ""),
        ("step", 2, kinds.TYPE_INT64, ""),
        ("file_version", 3, kinds.TYPE_STRING, ""),
        ("summary", 5, kinds.TYPE_MESSAGE, "Summary"),
        ("session_log", 7, kinds.TYPE_MESSAGE, "SessionLog"),
    )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("of_this_test.Event"))


def payloads(path: Path) -> list[bytes]:
    """Every record of a TFRecord file, its checksums verified."""
    data, found = path.read_bytes(), []

    def masked(part: bytes) -> int:
        crc = bitwise_crc32c(part)
        return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF

    while data:
        (length,) = struct.unpack("<Q", data[:8])
        assert struct.unpack("<I", data[8:12])[0] == masked(data[:8])
        payload = data[12 : 12 + length]
        assert len(payload) == length
        assert struct.unpack("<I", data[12 + length : 16 + length])[0] == masked(payload)
        found.append(payload)
        data = data[16 + length :]
    return found


def curves(folder: Path) -> Curves:
    """Every tag's points, as a reader has them that drops what a restart takes again."""
    kind, found = messages(), defaultdict(list)
    for path in sorted(folder.iterdir()):
        read = [kind.FromString(payload) for payload in payloads(path)]
        assert read[0].file_version == "brain.Event:2"
        assert read[1].session_log.status == 1
        for tag, points in found.items():
            found[tag] = [point for point in points if point[0] < read[1].step]
        for event in read[2:]:
            assert event.wall_time > 1.7e9
            for value in event.summary.value:
                found[value.tag].append((event.step, value.simple_value))
    return dict(found)


def ran(text: Path) -> RunDirectory:
    """A run that was killed between two checkpoints, so that its resumption takes steps again."""
    wanted = plan(
        text,
        train__max_steps=9,
        train__log_every=1,
        train__evaluate_every=3,
        train__checkpoint_every=3,
        train__tensorboard=True,
    )
    run = create_run(wanted)

    def killed(phase: str, step: int) -> bool:
        if step >= 5:
            raise RuntimeError("killed")
        return False

    assert attempt(run, killed) != 0
    assert attempt(run) == 0
    return run


def expected(run: RunDirectory) -> Curves:
    """What the run's own event log says, the later attempt's word counting."""
    steps = {s.step: s for s in told(run, events.Step)}
    evaluations = {e.step: e for e in told(run, events.Evaluation)}
    found: Curves = {
        "train/loss": [(n, s.loss) for n, s in sorted(steps.items())],
        "train/learning_rate": [(n, s.learning_rate) for n, s in sorted(steps.items())],
        "train/gradient_norm": [(n, s.gradient_norm) for n, s in sorted(steps.items())],
        "train/tokens_per_second": [(n, s.tokens_per_second) for n, s in sorted(steps.items())],
        "validation/loss": [(n, e.loss) for n, e in sorted(evaluations.items())],
        "validation/bits_per_byte": [(n, e.bits_per_byte) for n, e in sorted(evaluations.items())],
    }
    assert [n for n, _ in found["train/loss"]] == list(range(1, 10))
    assert [n for n, _ in found["validation/loss"]] == [3, 6, 9]
    return found


def agree(found: Curves, wanted: Curves) -> None:
    for tag, points in wanted.items():
        assert [step for step, _ in found[tag]] == [step for step, _ in points], tag
        values = [value for _, value in found[tag]]
        assert values == pytest.approx([value for _, value in points], rel=1e-6), tag
    sizes = found["memory/peak_mib"]
    assert all(value > 1 for _, value in sizes)
    steps = [step for step, _ in sizes]
    assert steps == sorted(set(steps))


def test_every_figure_is_there_once_though_the_run_was_killed_and_resumed(text: Path) -> None:
    run = ran(text)
    assert len(list((run.path / FOLDER).iterdir())) == 2
    agree(curves(run.path / FOLDER), expected(run))


def test_tensorboard_itself_reads_the_same(text: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = ran(text)
    reader = EventAccumulator(str(run.path / FOLDER))
    reader.Reload()
    found = {
        tag: [(s.step, s.value) for s in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]
    }
    agree(found, expected(run))


def test_it_is_off_unless_asked_for_and_its_checksum_is_the_known_one(text: Path) -> None:
    run = create_run(plan(text, train__max_steps=1))
    assert attempt(run) == 0
    assert not (run.path / FOLDER).exists()
    assert crc32c(b"123456789") == 0xE3069283  # RFC 3720's polynomial, the catalogued check value
    assert crc32c(bytes(32)) == 0x8A9136AA  # RFC 3720, appendix B.4
    assert record(b"")[:8] == bytes(8)


@pytest.mark.parametrize("units", ["tokens", "windows"])
def test_the_speed_is_that_of_what_the_task_counts(units: str) -> None:
    step = events.Step(
        step=3, epoch=1, loss=1.0, learning_rate=1e-3, gradient_norm=1.0, tokens=96,
        tokens_per_second=8.0, step_seconds=0.1,
    )  # fmt: skip
    found = dict(scalars(step, units)[1])
    assert found[f"train/{units}_per_second"] == 8.0
    assert found[f"train/{units}"] == 96
    assert len([tag for tag in found if "token" in tag]) == (2 if units == "tokens" else 0)


def test_a_figure_beyond_fp32_becomes_the_largest_one() -> None:
    for value, stored in ((1e39, LARGEST), (-1e300, -LARGEST), (math.inf, math.inf), (0.5, 0.5)):
        (found,) = struct.unpack("<f", _float(2, value)[-4:])
        assert found == stored


def test_a_disk_that_fails_ends_the_curves_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    board = TensorBoard(tmp_path / "board", 1, 1, 1.8e9, "tokens")

    class Full:
        def write(self, data: bytes) -> int:
            raise OSError(28, "No space left on device")

        def __enter__(self) -> Full:
            return self

        def __exit__(self, *error: object) -> None:
            pass

    board._file = Full()  # type: ignore[assignment]
    for step in (1, 2):
        board.see(events.Evaluation(step=step, loss=1.0, bits_per_byte=None, tokens=1, seconds=1.0))
    board.close()
    assert "TensorBoard's file ends here" in capsys.readouterr().out
    waiting = board._queue.qsize()
    board.see(events.Evaluation(step=3, loss=1.0, bits_per_byte=None, tokens=1, seconds=1.0))
    assert board._queue.qsize() == waiting
