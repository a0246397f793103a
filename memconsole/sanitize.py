"""Makes text from datasets, logs, files and drivers safe to print on a terminal.

Every string from outside this program passes `clean` or `clean_line` once, where it enters. Control
sequences follow ECMA-48 (CSI, OSC, DCS, APC, PM, SOS, their 8-bit forms, and the BEL-terminated
strings of xterm). Invisible and reordering characters follow Unicode TR36 and TR39.
"""

from __future__ import annotations

import re
import unicodedata

MAX_COMBINING = 4
"""Combining marks kept on one character. Real scripts use at most three or four."""

ESCAPE_SYMBOL = "\N{SYMBOL FOR ESCAPE}"
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

# A device control string is an introducer, a payload and a terminator. If the terminator is not on
# the same line, only the introducer is replaced, so that a cut sequence cannot hide the rest of a
# log. The payload class excludes every introducer, which keeps matching linear.
_STRING = (
    r"(?:\x1b[\]PX^_]|[\x90\x98\x9d\x9e\x9f])[^\x07\x18\x1a\x1b\x80-\x9f\n]*"
    r"(?:\x07|\x1b\\|\x9c|[\x18\x1a])"
)
_CSI = r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"
_OTHER = r"\x1b[ -/]*[0-~]"
_SEQUENCE = re.compile(f"(?P<csi>{_CSI})|{_STRING}|{_OTHER}|\r\n")

_INVISIBLE = (
    "\u00ad\u061c\u180b-\u180f\u200b-\u200f\u2060-\u2065\u206a-\u206f\ufe00-\ufe0f\ufeff"
    "\ufff9-\ufffb\U000e0000-\U000e0fff"
)
_BIDI = "\u202a-\u202e\u2066-\u2069"
_CHARACTER = re.compile(
    f"[\x00-\x08\x0b-\x1f\x7f-\x9f{_INVISIBLE}{_BIDI}\u2028\u2029\ud800-\udfff]"
)
_DROPPED = re.compile(f"[{_INVISIBLE}]")
_PLAIN = re.compile(r"[\n\t -~]*\Z")


def utf8(text: str) -> str:
    """`text` with the bytes escaped that are not UTF-8: names of files and variables may hold such bytes."""
    return text.encode("utf-8", "backslashreplace").decode()


def clean(text: str) -> str:
    """`text` without anything that acts on a terminal; line breaks and tabs are kept.

    Colours and cursor movements are dropped. Other sequences and control characters become one
    visible symbol, bidirectional controls become U+FFFD, and zero-width characters and tags are
    dropped.
    """
    if _PLAIN.match(text):
        return text
    text = _SEQUENCE.sub(_replace_sequence, text)
    text = _CHARACTER.sub(_replace_character, text)
    return text if text.isascii() else _cap_combining(text)


def clean_line(text: str, limit: int = 4096) -> str:
    """`text` as one line of at most `limit` characters; it ends in `…` if it was cut."""
    # Cutting before cleaning bounds the work on a line of many megabytes.
    line = clean(text[: 16 * limit + 16])
    if "\n" in line:
        line = line.replace("\n", " ")
    if "\t" in line:
        line = line.expandtabs(8)
    return line if len(line) <= limit else line[: max(limit - 1, 0)] + "…"


def _replace_sequence(match: re.Match[str]) -> str:
    if match.group() == "\r\n":
        return "\n"
    return "" if match.group("csi") else ESCAPE_SYMBOL


def _replace_character(match: re.Match[str]) -> str:
    character = match.group()
    code = ord(character)
    if code < 0x20:
        return chr(0x2400 + code)
    if code == 0x7F:
        return "\N{SYMBOL FOR DELETE}"
    if code in (0x85, 0x2028, 0x2029):
        return "\n"
    return "" if _DROPPED.match(character) else REPLACEMENT


def _cap_combining(text: str) -> str:
    """Keep at most `MAX_COMBINING` marks in a row (categories Mn and Me, which have no width)."""
    run = 0
    kept: list[str] = []
    for character in text:
        run = run + 1 if unicodedata.category(character) in ("Mn", "Me") else 0
        if run <= MAX_COMBINING:
            kept.append(character)
    return "".join(kept)
