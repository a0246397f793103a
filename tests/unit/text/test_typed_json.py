"""Struct types are learned under one lock, and nowhere else."""

import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from memconsole import typed_json

ROOT = Path(__file__).parents[3]
STRESS = """
import sys, threading
import msgspec
from memconsole import typed_json

sys.setswitchinterval(1e-6)
numbers = {f"f{n}": n for n in range(20)}
for round in range(60):
    inner = [
        msgspec.defstruct(f"Inner{k}", [(name, int) for name in numbers]) for k in range(10)
    ]
    kind = msgspec.defstruct("Outer", [(f"g{k}", inner[k]) for k in range(10)])
    content = msgspec.json.encode({f"g{k}": numbers for k in range(10)})
    start, seen = threading.Barrier(4), []

    def decode():
        start.wait()
        seen.append(typed_json.decode(content, kind).g9.f19)

    threads = [threading.Thread(target=decode) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [19] * 4
"""


def test_four_threads_may_meet_a_type_at_once() -> None:
    """With `msgspec.json.decode` in its place the process dies of SIGSEGV within a few rounds."""
    done = subprocess.run([sys.executable, "-c", STRESS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_decoder_is_made_once_and_a_value_converted_as_msgspec_does() -> None:
    class Point(msgspec.Struct, frozen=True):
        x: int

    assert typed_json.decoder(Point) is typed_json.decoder(Point)
    assert typed_json.convert({"x": 3}, Point) == Point(3)
    with pytest.raises(msgspec.ValidationError):
        typed_json.convert({"x": "3"}, Point)


def test_nothing_else_teaches_msgspec_a_type() -> None:
    learns = re.compile(r"msgspec\.(convert|json\.Decoder|msgpack\.\w+)\(|json\.decode\(.*type=")
    found = [
        f"{path}: {line.strip()}"
        for room in ("memconsole", "backends")
        for path in (ROOT / room).rglob("*.py")
        if path.name != "typed_json.py"
        for line in path.read_text().splitlines()
        if learns.search(line)
    ]
    assert not found
