"""Encodes one event as one log line: ``<compact JSON>\\t<crc32, 8 hex digits>\\n``."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, cast

import msgspec

from memconsole import typed_json
from memconsole.runs.record.log import events
from memconsole.runs.record.log.events import Event, Record
from memconsole.runs.record.redaction import redact

RECORD_BYTES = 64 << 10
"""The longest line written. Texts of longer records are cut in the middle."""


class Gap(Event, frozen=True, kw_only=True):
    """Records that could not be written."""

    count: int
    reason: str


_decoder: msgspec.json.Decoder[Record | Gap] = typed_json.decoder(cast(Any, Record | Gap))
_encoder = msgspec.json.Encoder()


def encode_line(event: Event, secrets: Collection[bytes] = ()) -> bytes:
    """One line of the log: at most `RECORD_BYTES`, and always decodable."""
    payload = _encode(event)
    text = payload.decode()
    if redact(text) != text:
        event = _map_texts(event, redact)
        payload = _encode(event)
    for secret in secrets:
        payload = payload.replace(secret, b"[redacted]")
    longest = RECORD_BYTES
    while len(payload) > RECORD_BYTES - 10 and longest > 16:
        longest //= 2
        payload = _encode(_map_texts(event, partial(_cut, longest=longest)))
        for secret in secrets:
            payload = payload.replace(secret, b"[redacted]")
    if len(payload) > RECORD_BYTES - 10:
        payload = _encode(_left_out(event, "too long"))
    return b"%b\t%08x\n" % (payload, zlib.crc32(payload))


def decode_line(line: bytes) -> Record | Gap | None:
    """The event of a line without its newline; None for a whole record of an unknown kind.

    Raises `ValueError` if the line is damaged.
    """
    payload, tab, checksum = line.rpartition(b"\t")
    if not tab or len(checksum) != 8 or b"%08x" % zlib.crc32(payload) != checksum:
        raise ValueError("damaged line")
    try:
        return _decoder.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _encode(event: Event) -> bytes:
    """JSON of the event; if that could not be decoded again, of a warning that says why."""
    try:
        payload = _encoder.encode(event)
    except (UnicodeEncodeError, OverflowError):
        event = _map_texts(event, lambda text: text.encode("utf-8", "replace").decode())
        payload = _encoder.encode(event)
    try:
        # A number that is not finite is encoded as null, which only optional fields accept.
        _decoder.decode(payload)
    except msgspec.ValidationError as error:
        payload = _encoder.encode(_left_out(event, str(error)))
    return payload


def _left_out(event: Event, why: str) -> events.Warning:
    kind = type(event).__name__.lower()
    return events.Warning(
        time_wall=event.time_wall,
        time_boot=event.time_boot,
        sequence=event.sequence,
        message=f"a record of kind {kind} was left out: {why}",
    )


def _map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """`value` with `change` applied to every text inside it."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, tuple):
        return tuple(_map_texts(item, change) for item in value)
    if isinstance(value, dict):
        return {change(str(k)): _map_texts(item, change) for k, item in value.items()}
    if isinstance(value, msgspec.Struct):
        names = value.__struct_fields__
        changed = {name: _map_texts(getattr(value, name), change) for name in names}
        return type(value)(**changed)
    return value


def _cut(text: str, longest: int) -> str:
    if len(text) <= longest:
        return text
    half = longest // 2
    return f"{text[:half]} … [{len(text) - 2 * half} characters left out] … {text[-half:]}"
