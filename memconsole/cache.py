"""The folder for files that this machine can make again."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """``$XDG_CACHE_HOME/memconsole``, or the system's usual cache folder."""
    home = environment.get("XDG_CACHE_HOME", "")
    if os.path.isabs(home):
        return Path(home) / "memconsole"
    import platformdirs

    return platformdirs.user_cache_path("memconsole")
