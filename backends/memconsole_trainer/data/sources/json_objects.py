"""Finds the objects of a JSON file: the elements of an array, or objects one after another."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from memconsole.regular_file import open_regular
from memconsole_trainer.data.sources.json_lines import LINE_BYTES, refused

BLOCK_BYTES = 1 << 20
_SPACE = re.compile("[ \t\r\n]*")
_BOM = "\xef\xbb\xbf"
"""The byte order mark of UTF-8, as Latin-1."""


def places(path: Path) -> Any | None:
    """The byte offsets (n, 2) at which the objects of a file begin and end; None if the file holds anything else.
    Raises `OSError`.

    The file is read as Latin-1, in which each byte is a character: the syntax of JSON has only ASCII.
    """
    decode = json.JSONDecoder(parse_constant=refused).raw_decode
    found: list[tuple[int, int]] = []
    array, wanted = False, "[{"
    with open_regular(path) as file:
        text, start = file.read(BLOCK_BYTES).decode("latin-1"), 0
        at = len(_BOM) if text.startswith(_BOM) else 0
        while True:
            at = _SPACE.match(text, at).end()  # type: ignore[union-attr]  # it always matches
            if at == len(text):
                text, start, at = file.read(BLOCK_BYTES).decode("latin-1"), start + at, 0
                if not text:
                    break
                continue
            sign = text[at]
            if sign not in wanted:
                return None
            if sign != "{":
                array, wanted = True, {"[": "{", ",": "{", "]": ""}[sign]
                at += 1
                continue
            try:
                end = decode(text, at)[1]
            except RecursionError:
                return None
            except ValueError:  # damaged, or longer than what was read
                rest = text[at:]
                more = file.read(max(BLOCK_BYTES, len(rest)))
                if not more or len(rest) > LINE_BYTES:
                    return None
                text, start, at = rest + more.decode("latin-1"), start + at, 0
                continue
            found.append((start + at, start + end))
            at, wanted = end, ",]" if array else "{"
    whole = found and (not wanted if array else True)
    return np.array(found, np.int64) if whole else None
