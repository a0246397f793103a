"""Nothing that passes `clean` can act on a terminal, and ordinary text passes unchanged."""

from __future__ import annotations

import re
import time
import unicodedata

import pyte
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memconsole.sanitize import MAX_COMBINING, clean, clean_line

HOSTILE = [
    "\x1b]0;title\x07",
    "\x1b]52;c;aGFsbG8=\x07",
    "\x1b]52;c;aGFsbG8=\x1b\\",
    "\x9d52;c;aGFsbG8=\x9c",
    "\x1b]8;;http://evil\x1b\\link\x1b]8;;\x1b\\",
    "\x1b[2J",
    "\x1b[6n",
    "\x1b[1;31m",
    "\x1b[?1049h",
    "\x1b[38:2::255:0:0m",
    "\x9b2J",
    '\x1bP$q"p\x1b\\',
    "\x90+q544e\x9c",
    "\x1b_Gf=100;AAAA\x1b\\",
    "\x1b^pm\x1b\\",
    "\x1bXsos\x1b\\",
    "\x1bc",
    "\x1b(0",
    "\x1b#8",
    "\x1b",
    "\x1b]0;never ends",
    "\x1b[12",
    "\x07\x08\x0b\x0c\x0e\x0f\x00",
    "\x7f",
    "".join(chr(c) for c in range(0x80, 0xA0)),
    "\u202eevil\u202c\u2066x\u2069",
    "z\u200b\u200c\u200d\u2060\ufeffw",
    "\U000e0041\U000e0042",
    "e" + "\u0301" * 300,
    "\ud83d",
    "\udc80\udcff",
    "a\u2028b\u2029c",
    "\x1b\x1b[0m[2J",
    "\x1b]0;a\x1b]52;c;eA==\x07",
]
FORBIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2060-\u206f\u2028\u2029\ufeff"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)
anything = st.text(
    st.characters(codec=None, categories=None) | st.sampled_from("\x1b\x9b]P[;m\x07\\\r\n\t")
)


@pytest.mark.parametrize("hostile", HOSTILE)
def test_hostile_text_loses_every_control(hostile: str) -> None:
    assert not FORBIDDEN.search(clean(f"before {hostile} after"))
    assert "before" in clean(f"before {hostile} after")


@given(anything)
def test_no_text_keeps_a_character_a_terminal_obeys(text: str) -> None:
    assert not FORBIDDEN.search(clean(text))


@given(anything)
def test_cleaning_twice_changes_nothing_more(text: str) -> None:
    assert clean(clean(text)) == clean(text)


@given(anything, st.integers(1, 80))
def test_a_clean_line_is_one_line_within_its_limit_and_encodable(text: str, limit: int) -> None:
    line = clean_line(text, limit)
    assert len(line) <= limit
    assert "\n" not in line
    assert "\t" not in line
    line.encode("utf-8")


@given(st.text(st.characters(categories=["L", "Nd", "P", "Sm", "Zs"])))
def test_letters_digits_and_punctuation_pass_unchanged(text: str) -> None:
    assert clean(text) == text


@given(anything)
def test_a_terminal_shows_cleaned_text_without_answering_or_styling(text: str) -> None:
    screen = pyte.Screen(80, 24)
    answers: list[str] = []
    screen.write_process_input = answers.append
    pyte.Stream(screen).feed(clean(text).replace("\n", "\r\n"))
    assert not answers
    assert screen.title == ""
    assert {cell.fg for row in screen.buffer.values() for cell in row.values()} <= {"default"}


def test_combining_marks_are_capped_but_real_ones_stay() -> None:
    assert clean("Ti\u1ebf\u0302\u0301ng") == "Ti\u1ebf\u0302\u0301ng"
    zalgo = clean("a" + "\u0301" * 50 + "b")
    marks = sum(unicodedata.category(c) == "Mn" for c in zalgo)
    assert marks == MAX_COMBINING
    assert zalgo.endswith("b")


def test_colour_is_dropped_and_an_unfinished_sequence_cannot_hide_the_rest_of_a_line() -> None:
    assert clean("\x1b[31mred\x1b[0m") == "red"
    assert "secret" in clean("\x1b]0;secret")


def test_line_breaks_survive_and_dos_line_ends_are_one_break() -> None:
    assert clean("a\r\nb\tc\n") == "a\nb\tc\n"


@pytest.mark.parametrize("unit", ["\x1b]", "\x9d", "\x1b[", "\x1b[1;", "\x90a", "\u0301"])
def test_a_megabyte_of_openings_is_cleaned_in_linear_time(unit: str) -> None:
    begin = time.perf_counter()
    clean(unit * 300_000)
    assert time.perf_counter() - begin < 20
