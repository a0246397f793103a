"""The cache of compiled programs on disk."""

from __future__ import annotations

import contextlib
import hashlib
import platform
from pathlib import Path

import jax

from memconsole.plan.machine import processor
from memconsole.private_files import private_folder
from memconsole.user_folders import cache_folder

LEAST_COMPILE_SECONDS = 0.1
"""Programs that compile faster are not stored: reading one takes about as long."""
CACHE_BYTES = 2**29
"""Most bytes of the cache at the start of a run."""


def enable_compile_cache() -> None:
    """Let JAX store compiled programs on disk, so that a resumed run need not compile again. Does nothing if the user has
    chosen a cache, or if no folder can be made.

    A program compiled for one processor may not run on another, and machines may share a home
    directory. So each kind of processor has its own cache directory.
    """
    if jax.config.jax_compilation_cache_dir is not None:
        return
    key = hashlib.sha256(_cpu_features().encode()).hexdigest()[:12]
    path = cache_folder() / "jax" / f"{platform.machine()}-{key}"
    try:
        private_folder(path)
    except OSError:
        return
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", LEAST_COMPILE_SECONDS)
    _delete_oldest(path, CACHE_BYTES)


def _delete_oldest(directory: Path, most_bytes: int) -> None:
    """Delete files of `directory`, oldest first, until at most `most_bytes` remain.

    JAX's own limit needs a file-lock library, and warns if entries with and without it are mixed.
    """
    found = []
    with contextlib.suppress(OSError):
        found = [(x.stat().st_mtime, x.stat().st_size, x) for x in directory.iterdir()]
    excess = sum(size for _, size, _ in found) - most_bytes
    for _, size, file in sorted(found):
        if excess <= 0:
            return
        with contextlib.suppress(OSError):
            file.unlink()
        excess -= size


def _cpu_features() -> str:
    """What decides which programs this machine's processor can run."""
    return " ".join([*sorted(processor.flags()), platform.machine(), processor.name()])
