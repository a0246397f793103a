"""The tables of models, devices, datasets and presets, read on first use, and entries by their names."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from memconsole import typed_json
from memconsole.plan.catalog.entries import (
    CatalogDevice,
    DatasetEntry,
    ModelEntry,
    PresetEntry,
)
from memconsole.plan.plan import Plan, PlanError, nearest, quote

LOCAL_DEVICES = ("auto", "cpu", "cuda:0", "mps", "tpu")
"""Names of this machine's devices; cuda takes any index."""
_MIB = 2**20
Entry = TypeVar("Entry", ModelEntry, CatalogDevice, DatasetEntry, PresetEntry)


@lru_cache(maxsize=1)
def models() -> Mapping[str, ModelEntry]:
    """Every catalog model by name."""
    return _load("models", ModelEntry, lambda row: row)


@lru_cache(maxsize=1)
def devices() -> Mapping[str, CatalogDevice]:
    """Every device that can be planned for, by name."""
    return _load("devices", CatalogDevice, _device_row)


@lru_cache(maxsize=1)
def datasets() -> Mapping[str, DatasetEntry]:
    """Every catalog dataset by name; sizes of local data are filled in by `dataset(plan)`."""
    return _load("datasets", DatasetEntry, lambda row: {"where": "", **row})


@lru_cache(maxsize=1)
def presets() -> Mapping[str, PresetEntry]:
    """Every preset by name."""
    return _load("presets", PresetEntry, _preset_row)


def catalog_device(name: str) -> CatalogDevice:
    """The catalog device called `name`. Raises `PlanError` with the nearest name."""
    entry = devices().get(name)
    if entry is None:
        allowed = (*LOCAL_DEVICES, *devices())
        raise PlanError(
            f"device.name = {quote(name)}: not one of {', '.join(LOCAL_DEVICES)} "
            f"or a catalog device{nearest(name, allowed) or list_names(devices())}",
            "device.name",
        )
    return entry


def preset(name: str) -> Plan:
    """The plan called `name`. Raises `PlanError` with the nearest name."""
    entry = presets().get(name)
    if entry is None:
        raise PlanError(
            f"preset {quote(name)}: unknown{nearest(name, presets()) or list_names(presets())}",
            "preset",
        )
    return entry.plan


def default_plan() -> Plan:
    """The plan to start from when nothing has been chosen."""
    return preset("default")


def list_names(names: Mapping[str, object]) -> str:
    """All names of a catalog, for the end of an error line."""
    return f"; known: {', '.join(names)}"


def _load(table: str, entry_type: type[Entry], row_of: Any) -> Mapping[str, Entry]:
    rows = tomllib.loads(Path(__file__).with_name(f"{table}.toml").read_text(encoding="utf-8"))
    return MappingProxyType(
        {
            name: typed_json.convert({"name": name, **row_of(row)}, entry_type)
            for name, row in rows.items()
        }
    )


def _device_row(row: dict[str, Any]) -> dict[str, Any]:
    """Convert the table's MiB, GB/s and TFLOP/s to bytes, bytes/s and FLOP/s."""
    rates = {name: rate * 1e12 for name, rate in row.pop("tflops").items()}
    rates.setdefault("tf32", rates["fp32"])
    rates.setdefault("fp16", rates.get("bf16", rates["fp32"]))
    rates.setdefault("bf16", rates["fp32"])
    link = row.pop("link_gb", None)
    return {
        "link_bytes_per_second": None if link is None else link * 1e9,
        "total_bytes": row.pop("total_mib") * _MIB,
        "usable_bytes": row.pop("usable_mib") * _MIB,
        "bandwidth_bytes_per_second": row.pop("bandwidth_gb") * 1e9,
        "peak_flops": rates,
        **row,
    }


def _preset_row(row: dict[str, Any]) -> dict[str, Any]:
    return {"plan_document": row.pop("plan"), **row}
