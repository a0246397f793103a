"""The rows of the catalogs: models, devices, datasets and presets, each with its source."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from memconsole.plan.models.architecture import Architecture
from memconsole.plan.models.regressor import Regressor
from memconsole.plan.plan import Plan
from memconsole.plan.plan_file import from_document

DatasetKind = Literal["stdlib", "hub", "file", "made"]
"""made: a file that `memconsole data make` writes, and that is not there yet."""
DatasetFormat = Literal["text", "jsonl", "json", "csv", "parquet", "arrow", "hdf5", "directory"]


class RecommenderEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A recommender's sizes, which `[model]` of a plan may change."""

    decoder: str | Architecture
    """The name of a catalog model, or a decoder of its own."""
    items: int
    clusters: int
    embedding_size: int
    adapter_size: int


class ModelEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model: one fixed `architecture`, or a family sized by ``model.target_params``."""

    name: str
    label: str
    kind: Literal["fixed", "sized"]
    source: str
    architecture: Architecture | None = None
    """None for sized families, which `catalog.architecture(plan)` builds, and for models of other tasks."""
    task: str = "language"
    """What it learns: the name of one of `plan.tasks`."""
    regressor: Regressor | None = None
    """The model of a regression task."""
    recommender: RecommenderEntry | None = None
    """The model of a recommendation task."""
    default_target_params: int | None = None
    """A sized family's number of parameters if the plan names no target."""
    parameters: int | None = None
    """The published number of parameters; None for sized families."""
    sequence_length: int | None = None
    """Tokens per row in its original training, as a hint."""
    hub_id: str | None = None
    """Where trained weights of this shape are published."""
    note: str = ""


class CatalogDevice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A device that can be planned for without owning it. The field names match `Budget`.

    One device is what the framework lists as one: a core of a TPU v2, v3 or 7x, a chip of a TPU v4 to v6e.
    """

    name: str
    label: str
    kind: Literal["cpu", "gpu", "rocm", "apple", "tpu"]
    memory_label: Literal["VRAM", "HBM", "unified memory"]
    total_bytes: int
    """What the driver reports, not the marketing figure."""
    usable_bytes: int
    """What one process can use, including its own context, when nothing else runs."""
    bandwidth_bytes_per_second: float
    peak_flops: dict[str, float]
    """Dense peak in FLOP/s for each of fp32, tf32, bf16 and fp16, accumulating in fp32 where the
    device can. A precision without hardware of its own has the rate it falls back to."""
    link_bytes_per_second: float | None = None
    """To other devices of its kind in the same machine, in each direction; None: through the host."""
    source: str
    note: str = ""


class DatasetEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Text or rows to train on. None means that a value is not known without reading the data."""

    name: str
    label: str = ""
    kind: DatasetKind
    where: str
    """Hub id ``owner/name``, a path, or the directory of the standard library."""
    made_by: str | None = None
    """The command that writes the file, for the kind made."""
    config: str | None = None
    """The hub dataset's configuration, if it has several."""
    split: str | None = None
    text_column: str | None = None
    """Column with the text, if it is not the plan's default."""
    format: DatasetFormat | None = None
    """What a file holds; None for hub datasets."""
    documents: int | None = None
    bytes: int | None = None
    """UTF-8 text bytes, or the file size if the text's size is not known."""
    file_bytes: tuple[int, ...] = ()
    """Bytes of each file, if the data are text files, in the order in which they are read."""
    bytes_per_token: float | None = None
    """Rough bytes of `bytes` per token of a 4k to 32k BPE, for estimates before the run measures it."""
    source: str = ""
    note: str = ""

    @property
    def tokens(self) -> int | None:
        """About how many tokens one epoch holds, or None."""
        if self.bytes is None or not self.bytes_per_token:
            return None
        return round(self.bytes / self.bytes_per_token)


class PresetEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole plan under a name."""

    name: str
    label: str
    help: str
    source: str
    plan_document: dict[str, Any]

    @property
    def plan(self) -> Plan:
        """The preset as a plan. Raises `PlanError`."""
        return from_document(self.plan_document, f"preset {self.name}")
