"""The log tail shows what a terminal would, from any size of file."""

from __future__ import annotations

from pathlib import Path

from memconsole.runs.read.shown.log_tail import LogTail


def test_progress_bars_show_their_last_state(tmp_path: Path) -> None:
    log = tmp_path / "out.log"
    log.write_bytes(b"start\r\n 10%|#   |\r 50%|##  |\r100%|####|\r\nnext\n 3%|\r 4%|")
    assert LogTail(log).poll() == ("start", "100%|####|", "next", " 4%|")


def test_appended_lines_and_a_line_completed_later(tmp_path: Path) -> None:
    log = tmp_path / "out.log"
    tail = LogTail(log)
    assert tail.poll() == ()
    log.write_bytes(b"one\ntw")
    assert tail.poll() == ("one", "tw")
    with log.open("ab") as file:
        file.write(b"o\nthree\n")
    assert tail.poll() == ("one", "two", "three")


def test_only_the_last_lines_of_a_big_file_are_read(tmp_path: Path) -> None:
    log = tmp_path / "out.log"
    with log.open("wb") as file:
        file.truncate(5 * 2**30)  # sparse: reading it from the start would take minutes
        file.seek(0, 2)
        file.write(b"\n" + b"".join(b"line %d\n" % n for n in range(1000)))
    lines = LogTail(log).poll()
    assert len(lines) == 200
    assert lines[-1] == "line 999"
    assert lines[0] == "line 800"


def test_a_line_without_end_is_bounded(tmp_path: Path) -> None:
    log = tmp_path / "out.log"
    log.write_bytes(b"x" * 3_000_000)
    (line,) = LogTail(log).poll()
    assert len(line) <= 4096


def test_a_flood_between_two_looks_is_skipped_to_its_end(tmp_path: Path) -> None:
    log = tmp_path / "out.log"
    log.write_bytes(b"first\n")
    tail = LogTail(log)
    tail.poll()
    with log.open("ab") as file:
        file.writelines(b"flood %06d %s\n" % (n, b"." * 80) for n in range(50_000))
    lines = tail.poll()
    assert lines[-1].startswith("flood 049999")
    assert len(lines) == 200


def test_a_truncated_or_replaced_log_starts_over(tmp_path: Path) -> None:
    log = tmp_path / "out.log"
    log.write_bytes(b"old line\nold two\n")
    tail = LogTail(log)
    tail.poll()
    log.write_bytes(b"new\n")
    assert tail.poll() == ("new",)


def test_escapes_and_broken_utf8_do_not_reach_the_screen(tmp_path: Path) -> None:
    log = tmp_path / "out.log"
    log.write_bytes(b"\x1b]52;c;eA==\x07\x1b[31mred\x1b[0m \xff\xfe caf\xc3\xa9\n50%\r\x1b[K\n")
    first, second = LogTail(log).poll()
    assert "\x1b" not in first
    assert first.endswith("red \N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER} café")
    assert second == "50%"
