"""What the plan's sections have in common: their type, and how a setting is described."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Meta

MOST = 1_000_000_000_000
"""Upper limit of counts that have no other limit. It keeps sums of bytes within 64 bits."""


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Common shape of the plan's sections."""


def about(text: str, **limits: Any) -> Meta:
    """A setting's help, and the limits of a number: `ge`, `gt`, `le`, `lt`."""
    return Meta(description=text, **limits)
