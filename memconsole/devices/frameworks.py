"""Finds out which devices the installed frameworks support, without importing them."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from functools import lru_cache
from pathlib import Path

import msgspec


class Framework(msgspec.Struct, frozen=True, kw_only=True):
    """An installed framework and the kinds of device it can use: cpu, gpu, rocm, apple, tpu."""

    name: str
    version: str
    kinds: frozenset[str]


@lru_cache(maxsize=1)
def torch_framework() -> Framework | None:
    """The installed PyTorch, or None. A build supports one kind of GPU at most."""
    folder = _package_folder("torch")
    if folder is None:
        return None
    try:
        return torch_of((folder / "version.py").read_text(encoding="utf-8"))
    except OSError:
        return None


@lru_cache(maxsize=1)
def jax_framework() -> Framework | None:
    """The installed JAX, or None. Support for a device is a plugin, a distribution of its own."""
    if _package_folder("jax") is None:
        return None
    names = {
        re.sub(r"[-_.]+", "-", distribution.metadata["Name"] or "").lower()
        for distribution in importlib.metadata.distributions()
    }
    return jax_of(names, _version("jax"))


def framework_of(backend: str) -> Framework | None:
    """The framework a backend trains with; None if not installed or unknown."""
    if backend == "torch":
        return torch_framework()
    return jax_framework() if backend == "jax" else None


def torch_of(version_file: str) -> Framework:
    """The framework described by the text of ``torch/version.py``."""

    def value(name: str) -> str:
        match = re.search(rf"^{name}\b[^=\n]*=\s*'([^']*)'", version_file, re.MULTILINE)
        return match[1] if match else ""

    kinds = {"cpu"}
    if value("cuda"):
        kinds.add("gpu")
    if value("hip"):
        kinds.add("rocm")
    if not value("cuda") and not value("hip") and "+" not in value("__version__"):
        # The macOS wheels have no local version; the Linux wheels without GPU support end in +cpu.
        kinds.add("apple")
    return Framework(name="torch", version=value("__version__"), kinds=frozenset(kinds))


def jax_of(distributions: set[str], version: str) -> Framework:
    """JAX with the device plugins among the installed distributions (normalized names)."""
    kinds = {"cpu"}
    for name in distributions:
        if re.fullmatch(r"jax-cuda\d+-plugin", name):
            kinds.add("gpu")
        if re.fullmatch(r"jax-rocm\d+-plugin", name):
            kinds.add("rocm")
        if name in ("libtpu", "libtpu-nightly"):
            kinds.add("tpu")
    return Framework(name="jax", version=version, kinds=frozenset(kinds))


def _package_folder(name: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    return Path(spec.origin).parent if spec and spec.origin else None


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
