"""Writes weights as a Hugging Face directory: config.json and safetensors."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memconsole.plan.models.architecture import Architecture
from memconsole_trainer.engine import WeightSource
from memconsole_trainer.weights.config_json import config
from memconsole_trainer.weights.huggingface import exported

SHARD_BYTES = 4 << 30
DTYPES = ("float32", "bfloat16", "float16")
"""The types that weights are exported in."""
Change = Callable[[str, NDArray[np.generic]], Iterable[tuple[str, NDArray[np.generic]]]]
"""(name, tensor) -> the named tensors that are stored instead."""


def as_it_is(name: str, array: NDArray[np.generic]) -> Iterable[tuple[str, NDArray[np.generic]]]:
    """The `Change` that changes nothing."""
    return ((name, array),)


def export(
    architecture: Architecture,
    weights: WeightSource,
    out: Path,
    dtype: str = "float32",
    change: Change = as_it_is,
    more: Mapping[str, Any] | None = None,
) -> bool:
    """Write config.json and safetensors into the folder `out`, which is made if it is missing.

    Weights are written shard by shard, so no more than
    `SHARD_BYTES` and one tensor are in memory. Tensors are rounded to `dtype`, then `change` maps
    each to the tensors it is stored as; `more` is added to config.json. Returns whether rounding
    changed a weight. Raises OSError.
    """
    out.mkdir(parents=True, exist_ok=True)
    description = {**config(architecture), "dtype": dtype, **(more or {})}
    (out / "config.json").write_text(json.dumps(description, indent=2) + "\n")
    rounding = Rounding(dtype)
    named = ((n, rounding(array)) for n, array in exported(architecture, weights))
    write_shards((t for one in named for t in change(*one)), out)
    return rounding.changed


def write_shards(tensors: Iterable[tuple[str, NDArray[np.generic]]], out: Path) -> None:
    """Write tensors to safetensors files of about `SHARD_BYTES`, with an index if there are several. Raises OSError."""
    shard: dict[str, NDArray[np.generic]] = {}
    shard_of: dict[str, int] = {}
    count, shard_bytes, total = 1, 0, 0
    for name, array in tensors:
        if shard_bytes and shard_bytes + array.nbytes > SHARD_BYTES:
            save(shard, out / f"part-{count}")
            shard, shard_bytes, count = {}, 0, count + 1
        shard[name] = array
        shard_of[name] = count
        shard_bytes += array.nbytes
        total += array.nbytes
    save(shard, out / f"part-{count}")
    if count == 1:
        os.replace(out / "part-1", out / "model.safetensors")
        return
    names = {i: f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)}
    for i, name in names.items():
        os.replace(out / f"part-{i}", out / name)
    index = {
        "metadata": {"total_size": total},
        "weight_map": {name: names[number] for name, number in shard_of.items()},
    }
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


class Rounding:
    """Converts arrays to one of `DTYPES`, and notes whether that changed a value."""

    def __init__(self, dtype: str) -> None:
        self._dtype = dtype
        self.changed = False

    def __call__(self, array: NDArray[np.generic]) -> NDArray[np.generic]:
        rounded = cast_to(array, self._dtype)
        if rounded is not array and not self.changed:
            before, after = np.asarray(array, np.float32), np.asarray(rounded, np.float32)
            self.changed = not np.array_equal(before, after)
        return rounded


def save(tensors: Mapping[str, NDArray[np.generic]], path: Path) -> None:
    """Write a safetensors file that others may read as any new file. Raises OSError."""
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    path.touch()
    mode = path.stat().st_mode
    try:
        save_file(dict(tensors), path, metadata={"format": "pt"})
    except SafetensorError as error:
        match = re.search(r"\(os error (\d+)\)", str(error))
        if match is None:
            raise
        number = int(match[1])
        raise OSError(number, os.strerror(number), str(path)) from None
    path.chmod(mode)  # save_file gives the file to this user alone


def cast_to(array: NDArray[np.generic], dtype: str) -> NDArray[np.generic]:
    """The array in one of `DTYPES`. Values beyond the range of float16 are clipped and do not become infinite."""
    if array.dtype.name == dtype:
        return array
    if dtype == "bfloat16":
        import ml_dtypes  # type: ignore[import-not-found,unused-ignore]

        return array.astype(ml_dtypes.bfloat16)
    wide = np.asarray(array, np.float32)
    if dtype == "float16":
        largest = np.finfo(np.float16).max
        wide = np.clip(wide, -largest, largest)
    return wide.astype(dtype)
