"""Finds a model by the name that a plan gives it: a directory, or a hub id in the local Hugging Face cache."""

from __future__ import annotations

import os
import re
from pathlib import Path

import msgspec

from memconsole import regular_file
from memconsole.plan.models.configs.families import CONFIG_BYTES
from memconsole.plan.models.files import ADAPTERS, merging
from memconsole.plan.plan import PlanError, quote

_REF_BYTES = 4096
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*", re.ASCII)


def is_hub_id(name: str) -> bool:
    """Whether `name` has the form of a hub id, owner/name."""
    return _HUB_ID.fullmatch(name) is not None


def find_model(name: str, key: str = "model.name") -> str | None:
    """The directory of a model given as a directory or as a hub id in the local cache.

    None if `name` is neither. `key` is the setting that names it. Never downloads. Raises `PlanError` for
    a file, for a directory without config.json, and for a hub model that is not in the cache.
    """
    try:
        path = Path(name).expanduser()
        is_directory, is_there = bool(name) and path.is_dir(), bool(name) and path.exists()
        has_config = is_directory and (path / "config.json").is_file()
    except (OSError, ValueError, RuntimeError):
        return None
    if has_config:
        return str(path.absolute())
    if is_directory:
        why = _adapters(path) or "that directory has no config.json"
        raise PlanError(f"{key} = {quote(name)}: {why}", key)
    if is_there:
        why = "a file; expected the directory that holds a model's config.json"
        raise PlanError(f"{key} = {quote(name)}: {why}", key)
    if not is_hub_id(name):
        return None
    cached = _cached_snapshot(name)
    if cached is None:
        raise PlanError(
            f"{key} = {quote(name)}: not in the local Hugging Face cache; download it with "
            f"`hf download {name}`, or give the directory that holds it",
            key,
        )
    return str(cached)


def _adapters(directory: Path) -> str:
    """What to do with PEFT adapters in `directory`; empty if it holds none."""
    try:
        config = msgspec.json.decode(regular_file.read(directory / ADAPTERS, CONFIG_BYTES))
    except OSError:
        return ""
    except (ValueError, RecursionError):
        config = None
    named = config.get("base_model_name_or_path") if isinstance(config, dict) else None
    base = quote(named) if isinstance(named, str) else "another model"
    return f"these are adapters of {base}, not a model; merge them first: {merging(directory)}"


def _cached_snapshot(hub_id: str) -> Path | None:
    """The main snapshot of a model in the hub's cache, or None.

    Layout: huggingface_hub, "Understand caching": models--owner--name/{refs/main,snapshots/<commit>}.
    """
    try:
        folder = _hub_cache() / f"models--{hub_id.replace('/', '--')}"
        commit = regular_file.read(folder / "refs" / "main", _REF_BYTES).decode("ascii").strip()
        snapshot = folder / "snapshots" / commit
        return snapshot if commit and (snapshot / "config.json").is_file() else None
    except (OSError, ValueError, RuntimeError):  # RuntimeError: there is no home folder
        return None


def _hub_cache() -> Path:
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if os.environ.get(name):
            return Path(os.environ[name]).expanduser()
    if os.environ.get("HF_HOME"):
        return Path(os.environ["HF_HOME"]).expanduser() / "hub"
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "huggingface" / "hub"
