"""Where torch.compile keeps what it compiles."""

from __future__ import annotations

from collections.abc import Mapping

from memconsole.user_folders import cache_folder


def inductor_cache(environment: Mapping[str, str]) -> dict[str, str]:
    """The variable that puts torch.compile's files into this user's cache folder. By default they go into a folder of a
    fixed name in the shared temporary folder, which another user could create first. Raises `NoHomeError`."""
    return {"TORCHINDUCTOR_CACHE_DIR": str(cache_folder(environment) / "inductor")}
