"""The console's colours, dark and light."""

from __future__ import annotations

from textual.theme import Theme

# Every colour is one of xterm's 256, so that terminals without true colour show the same.
DARK = Theme(
    name="memconsole-dark",
    primary="#5fafff",
    secondary="#87d7ff",
    accent="#ffaf5f",
    success="#87d787",
    warning="#ffd75f",
    error="#ff8787",
    foreground="#d0d0d0",
    background="#121212",
    surface="#1c1c1c",
    panel="#262626",
    dark=True,
)
LIGHT = Theme(
    name="memconsole-light",
    primary="#005faf",
    secondary="#005f87",
    accent="#af5f00",
    success="#005f00",
    warning="#875f00",
    error="#af0000",
    foreground="#262626",
    background="#ffffff",
    surface="#eeeeee",
    panel="#e4e4e4",
    dark=False,
)
