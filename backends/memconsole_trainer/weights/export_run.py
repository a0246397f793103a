"""Exports what a run has trained: the whole model, or its adapters alone."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memconsole import regular_file
from memconsole.given_path import given_path
from memconsole.plan import catalog
from memconsole.plan.models.architecture import parameters
from memconsole.plan.models.configs.families import CONFIG_BYTES, sees_images
from memconsole.plan.plan import Plan, PlanError
from memconsole.plan.sections.optimize import LoraTargets
from memconsole.plan.training.origin import RANDOM, origin
from memconsole.plan.training.trained import adapter_scale, has_adapter
from memconsole_trainer.engine import WeightsError
from memconsole_trainer.weights import tokenizer_export
from memconsole_trainer.weights.export import (
    DTYPES,
    Change,
    as_it_is,
    cast_to,
    export,
    save,
)
from memconsole_trainer.weights.huggingface import tensor_files
from memconsole_trainer.weights.huggingface_names import StoredParameter, stored_as
from memconsole_trainer.weights.trained import TrainedModel

Array = NDArray[np.generic]


def export_run(
    trained_model: TrainedModel,
    out: Path,
    dtype: str | None = None,
    change: Change = as_it_is,
    more: Mapping[str, Any] | None = None,
) -> list[str]:
    """Write the trained model as a Hugging Face directory, with its tokenizer. Returns remarks for the user.

    `dtype` None is that of the weights it started from. Raises OSError and `PlanError`.
    """
    ids: dict[str, Any] = {}
    tokenizer = trained_model.tokenizer() if trained_model.tokenizer_file.is_file() else None
    if tokenizer is not None:
        ids = tokenizer_export.token_ids(trained_model.plan, tokenizer)
    chosen = source_dtype(trained_model) if dtype is None else dtype
    rounded = export(
        trained_model.architecture, trained_model, out, chosen, change, {**ids, **(more or {})}
    )
    if tokenizer is not None:
        tokenizer_export.write(
            trained_model.plan, tokenizer, trained_model.architecture.max_positions, out
        )
    if dtype is not None or not rounded:
        return []
    return [
        f"the weights are rounded to {chosen}, as the base is stored: texts may differ from those of memconsole sample; "
        "--dtype float32 keeps them as trained"
    ]


def source_dtype(trained_model: TrainedModel) -> str:
    """The type of the weights that the run started from; float32 if it began from scratch."""
    directory = catalog.model_directory(trained_model.plan)
    if directory is None or trained_model.plan.model.weights == RANDOM:
        return DTYPES[0]
    try:
        config = json.loads(regular_file.read(Path(directory, "config.json"), CONFIG_BYTES))
        tables = config, config.get("text_config") or {}
        named = [t[key] for t in tables for key in ("dtype", "torch_dtype") if t.get(key) in DTYPES]
    except (OSError, ValueError, AttributeError, TypeError, RecursionError):
        named = []
    return named[0] if named else _stored_dtype(Path(directory))


def _stored_dtype(directory: Path) -> str:
    """The type of the largest tensor of a directory; float32 if it has none, or one of another type."""
    try:
        tensors = [
            (math.prod(f.shape(n)), f.dtype(n)) for f in tensor_files(directory) for n in f.names()
        ]
    except WeightsError:
        return DTYPES[0]
    found = max(tensors, default=(0, DTYPES[0]))[1]
    return found if found in DTYPES else DTYPES[0]


def export_adapters(trained_model: TrainedModel, out: Path, dtype: str | None = None) -> None:
    """Write the LoRA adapters alone into the folder `out`, as the library PEFT loads them onto the base. Raises what
    `export_run` raises."""
    rank = trained_model.plan.optimize.lora_rank
    if not rank:
        raise PlanError(
            "the run trained no adapters (optimize.lora_rank = 0): export the whole model"
        )
    if trained_model.plan.model.weights is not None:
        raise PlanError(
            f"the adapters belong to weights that no directory holds ({origin(trained_model.plan).words}): "
            "export the whole model"
        )
    base = catalog.model_directory(trained_model.plan)
    if base is not None and sees_images(base):
        raise PlanError(
            "the base also sees images, and PEFT would look for the adapters' names in the whole model: export the whole "
            "language model"
        )
    scale, targets = adapter_scale(trained_model.plan), trained_model.plan.optimize.lora_targets
    tensors: dict[str, Array] = {}
    ranks: dict[str, int] = {}
    for name, a, b in _peft_matrices(trained_model, rank, targets):
        prefix = f"base_model.model.{name}"
        tensors[f"{prefix}.lora_A.weight"] = cast_to(a, dtype or DTYPES[0])
        tensors[f"{prefix}.lora_B.weight"] = cast_to(b, dtype or DTYPES[0])
        ranks[_target_pattern(name, targets)] = len(a)
    save(tensors, out / "adapter_model.safetensors")
    joined = {name: size for name, size in ranks.items() if size != rank}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": _base_name(trained_model.plan.model.name, base),
        "r": rank,
        "lora_alpha": scale * rank,
        "rank_pattern": joined,
        "alpha_pattern": {name: scale * size for name, size in joined.items()},
        "target_modules": sorted(ranks),
        "fan_in_fan_out": trained_model.architecture.family == "gpt2",
        "lora_dropout": trained_model.plan.optimize.lora_dropout,
        "bias": "none",
        "inference_mode": True,
    }
    (out / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    if trained_model.tokenizer_file.is_file():
        tokenizer = trained_model.tokenizer()
        tokenizer_export.write(
            trained_model.plan, tokenizer, trained_model.architecture.max_positions, out
        )


def _base_name(name: str, directory: str | None) -> str:
    """What PEFT finds the base by: the id of a model of the hub, which other machines know too, or a directory."""
    return name if directory is None or not os.path.exists(given_path(name)) else directory


def adapter_notes(plan: Plan) -> list[str]:
    """What to know of exported adapters, in sentences; none if their base was not quantized."""
    storage = plan.optimize.base_storage
    if storage == "none":
        return []
    return [
        f"the adapters were trained on a base in {storage} (optimize.base_storage): on the base as it is stored, texts "
        "differ; an export without --format peft has what was trained"
    ]


def _target_pattern(module: str, targets: LoraTargets) -> str:
    """The pattern by which PEFT finds a module: its name, with its parent's name if only some modules of that name have
    adapters."""
    return ".".join(module.split(".")[-1 if targets == "all" else -2 :])


def _peft_matrices(
    trained_model: TrainedModel, rank: int, targets: LoraTargets
) -> Iterator[tuple[str, Array, Array]]:
    """The name of each adapted module of the base, with A (r, in) and B (out, r).

    The matrices that GPT-2 joins in one module have separate adapters. Their A are stacked one below the other,
    and each B has columns of its own, in the rows of its matrix.
    """
    adapters: list[tuple[StoredParameter, Array, Array]] = []
    """How each adapted matrix is stored, with A and B."""
    rows = parts = 0
    for parameter in parameters(trained_model.architecture):
        stored = stored_as(parameter, trained_model.architecture)
        if parameter.role != "matrix" or stored is None:
            continue
        if has_adapter(parameter, targets):
            stem = parameter.name.removesuffix(".weight")
            a, b = trained_model.trained(f"{stem}.lora_a"), trained_model.trained(f"{stem}.lora_b")
            adapters.append((stored, np.asarray(a, np.float32), np.asarray(b, np.float32)))
        rows, parts = rows + parameter.shape[0], parts + 1
        if parts < stored.parts:
            continue
        if adapters:
            joined_b = np.zeros((rows, rank * len(adapters)), np.float32)
            for number, (own, _, part) in enumerate(adapters):
                columns = slice(number * rank, (number + 1) * rank)
                joined_b[own.own_rows(len(part)), columns] = part
            joined_a = np.concatenate([a for _, a, _ in adapters])
            yield stored.name.removesuffix(".weight"), joined_a, joined_b
        adapters, rows, parts = [], 0, 0
