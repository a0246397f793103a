"""Verifies a checkpoint against its manifest: sizes and SHA-256 sums, before anything is parsed."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from memconsole import regular_file
from memconsole.regular_file import NotRegularError, TooLargeError, open_regular
from memconsole.runs.record.directory import CHECKPOINT_NAME

FORMAT = 1
MANIFEST = "MANIFEST.json"
STATE = "state.json"
DAMAGED = ".BAD"
"""Ends the name of a checkpoint that was found damaged."""
REPLACED = ".replaced-"
"""Begins the name of a checkpoint while a new one of the same step takes its place."""
READ_AGAIN_SECONDS = (0.1, 0.5, 2.0)
"""Pauses before a file that could not be read is read again."""
JSON_BYTES = 64 << 20
"""No manifest and no state is larger."""
_BLOCK = 1 << 20


def step_of(path: Path) -> int:
    match = CHECKPOINT_NAME.match(path.name)
    assert match is not None
    return int(match[1])


def damaged(checkpoints: Path) -> list[Path]:
    """The checkpoints of a folder that were found damaged, newest first."""
    found = [
        path for path in checkpoints.glob(f"step-*{DAMAGED}") if CHECKPOINT_NAME.match(path.name)
    ]
    return sorted(found, key=step_of, reverse=True)


def verify(path: Path, beat: Callable[[], None] | None = None) -> str | None:
    """How a checkpoint is damaged, or None if every file matches its size and hash.

    A file that looks damaged is read a second time. A file that cannot be read is tried a few times, and
    then raises `OSError`, because its content may be intact. `beat` is called while hashing.
    """
    problem = _read_patiently(path, beat)
    return None if problem is None else _read_patiently(path, beat)


def read_json(path: Path) -> Any:
    """The value in a JSON file of a checkpoint. Raises `OSError` and `ValueError`."""
    return json.loads(regular_file.read(path, JSON_BYTES, follow=False))


def _read_patiently(path: Path, beat: Callable[[], None] | None) -> str | None:
    for seconds in READ_AGAIN_SECONDS:
        try:
            return _damage(path, beat)
        except OSError:
            time.sleep(seconds)
    return _damage(path, beat)


def _damage(path: Path, beat: Callable[[], None] | None) -> str | None:
    try:
        manifest = read_json(path / MANIFEST)
        files = dict(manifest["files"])
        if manifest["format"] != FORMAT or STATE not in files or manifest["step"] != step_of(path):
            return f"{MANIFEST} is not of this format"
        present = {p.name for p in path.iterdir() if p.suffix == ".safetensors"}
        if extra := present - files.keys():
            return f"{min(extra)} is not in {MANIFEST}"
        for name, entry in files.items():
            file = path / name
            if Path(name).name != name or not file.is_file() or file.is_symlink():
                return f"{name} is missing"
            if file.stat().st_size != entry["size"]:
                return f"{name} has {file.stat().st_size} bytes instead of {entry['size']}"
            if _sha256(file, beat) != entry["sha256"]:
                return f"{name} does not match its SHA-256"
        if not isinstance(read_json(path / STATE), dict):
            return f"{STATE} holds no state"
    except (NotRegularError, TooLargeError) as error:
        return f"{Path(str(error.filename)).name} is {error.strerror}"
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        return f"{Path(str(error.filename)).name} is missing"
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return f"{MANIFEST}: {error}"
    return None


def _sha256(path: Path, beat: Callable[[], None] | None) -> str:
    digest, block = hashlib.sha256(), memoryview(bytearray(_BLOCK))
    with open_regular(path, follow=False) as file:
        while read := file.readinto(block):
            digest.update(block[:read])
            if beat is not None:
                beat()
    return digest.hexdigest()
