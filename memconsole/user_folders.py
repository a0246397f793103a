"""The folders of this user for memconsole's files."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from memconsole.errors import UserError


class NoHomeError(UserError, OSError):
    """The user has no home folder, as in some containers."""

    def __init__(self, variable: str) -> None:
        super().__init__(errno.ENOENT, f"no home folder: set HOME or {variable}")

    def __str__(self) -> str:
        return str(self.strerror)


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """The folder for files that this machine can make again. Raises `NoHomeError`."""
    return user_folder("cache", environment)


def config_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """``$XDG_CONFIG_HOME/memconsole``, by default ``~/.config/memconsole``, which is no folder without a home."""
    home = environment.get("XDG_CONFIG_HOME", "")
    root = Path(home) if os.path.isabs(home) else Path(os.path.expanduser("~/.config"))
    return root / "memconsole"


def user_folder(
    kind: Literal["cache", "state"], environment: Mapping[str, str] = os.environ
) -> Path:
    """``$XDG_CACHE_HOME/memconsole`` or ``$XDG_STATE_HOME/memconsole``, else the system's usual folder. Raises
    `NoHomeError`."""
    variable = f"XDG_{kind.upper()}_HOME"
    home = environment.get(variable, "")
    if os.path.isabs(home):
        return Path(home) / "memconsole"
    import platformdirs

    find = platformdirs.user_cache_path if kind == "cache" else platformdirs.user_state_path
    try:
        folder = find("memconsole")
    except RuntimeError:
        raise NoHomeError(variable) from None
    if not folder.is_absolute():  # older versions of platformdirs do not raise
        raise NoHomeError(variable)
    return folder
