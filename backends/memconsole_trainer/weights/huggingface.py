"""Reads and writes the tensors of Hugging Face checkpoints."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from memconsole.plan.models.architecture import Architecture, parameters
from memconsole.plan.models.files import weight_files
from memconsole.plan.models.model import Parameter
from memconsole.plan.models.tensor_header import TensorFileError
from memconsole.plan.plan import PlanError, printable
from memconsole_trainer.engine import WeightsError, WeightSource
from memconsole_trainer.weights.places import (
    ParameterPlace,
    assembled,
    head_name,
    inner_prefix,
    stored,
    taken,
)
from memconsole_trainer.weights.tensorfile import TensorFile

NAMED = 3
"""The most tensors that a message names; it only counts the others."""
_BUFFER = re.compile(r"(rotary_emb\.inv_freq|(attn|attention)\.(bias|masked_bias))$")
"""Constants that older checkpoints hold in addition to the weights."""
_IMAGES = (
    "vision_tower.",
    "multi_modal_projector.",
    "model.vision_tower.",
    "model.multi_modal_projector.",
)
"""What a model that also sees images has beside its language model."""


class HuggingFaceWeights:
    """A `WeightSource` over a directory of safetensors: one file, or several with an index.

    Raises `WeightsError` if the directory has no safetensors, lacks weights, has one of another
    shape, or has weights that the architecture does not use (its logits would be wrong).
    """

    read: str
    """How many parameters were found, and which tensors are not used because they are not separate weights."""

    def __init__(self, directory: Path, architecture: Architecture) -> None:
        self._files = tensor_files(directory)
        self._named = _prefixes_removed(self._files, architecture)
        self._parameters = {p.name: p for p in parameters(architecture)}
        self._places: dict[str, ParameterPlace] = {}
        for parameter in self._parameters.values():
            place = stored(parameter, architecture)
            if place is not None:
                self._places[parameter.name] = place
        shapes = {
            stored_name: _shape(self._parameters[name], place)
            for name, place in self._places.items()
            for stored_name in place.names
        }
        absent = [f"{name} {shape}" for name, shape in shapes.items() if name not in self._named]
        if absent:
            raise WeightsError(f"{directory}: no tensor {_listed(absent)}")
        for name, shape in shapes.items():
            file, original = self._named[name]
            if file.shape(original) != shape:
                raise WeightsError(
                    f"{directory}: {name} is {file.shape(original)}, the configuration says {shape}"
                )
        spare = [name for name in self._named if name not in shapes]
        copies = (f"{head_name(architecture)}.weight",) if architecture.tied_embeddings else ()
        unknown = [name for name in spare if name not in copies and not _BUFFER.search(name)]
        if unknown:
            raise WeightsError(
                f"{directory}: {_listed(unknown)} has no place in a {architecture.family} model "
                f"of this configuration"
            )
        count = sum(self._parameters[name].size for name in self._places)
        files = f"{len(self._files)} file{'s' if len(self._files) > 1 else ''}"
        if any(name.startswith(_IMAGES) for file in self._files for name in file.names()):
            spare.append("what sees images")
        left_out = f"; not used: {_listed(spare)}" if spare else ""
        self.read = f"{count:,} parameters read from {files}{left_out}"

    def tensor(self, name: str) -> NDArray[np.generic]:
        """The tensor of a canonical name. Matrices are (out, in); bfloat16 is widened to
        float32."""
        if name not in self._places:
            parameter = self._parameters[name]
            return np.full(parameter.shape, parameter.fill, dtype=np.float32)
        place, shape = self._places[name], self._parameters[name].shape
        if place.experts:
            return self._of_experts(place, shape)
        file, original = self._named[place.name]
        return taken(file.tensor(original, widen=True), place, shape[0])

    def _of_experts(self, place: ParameterPlace, shape: tuple[int, ...]) -> NDArray[np.generic]:
        """The tensors of all experts, one below the other."""
        rows = shape[0] // place.experts
        whole: NDArray[np.generic] | None = None
        for expert, name in enumerate(place.names):
            file, original = self._named[name]
            part = file.tensor(original, widen=True)
            if whole is None:
                whole = np.empty(shape, part.dtype)
            elif whole.dtype != part.dtype:
                whole = whole.astype(np.float32)
            whole[expert * rows : (expert + 1) * rows] = part
        assert whole is not None
        return whole


def _shape(parameter: Parameter, place: ParameterPlace) -> tuple[int, ...]:
    """The shape of a stored tensor."""
    own, *columns = parameter.matrix_shape if place.experts else parameter.shape
    rows = place.rows(own)
    if place.stacked:
        return (place.stacked, rows // place.stacked, *columns)
    found = (rows, *columns)
    return found[::-1] if place.transpose else found


def _listed(names: list[str]) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - NAMED:,} more" if len(names) > NAMED else ""
    return printable(", ".join(names[:NAMED])) + more


def exported(
    architecture: Architecture, source: WeightSource
) -> Iterator[tuple[str, NDArray[np.generic]]]:
    """Yield `source`'s weights with Hugging Face names and layouts, one tensor at a time.

    Parameters that no Hugging Face model has (the auxiliary ones) are left out. GPT-2 always has
    biases there: those of a model without any are zeros.
    """
    if architecture.family == "gpt2" and not architecture.biases:
        architecture = msgspec.structs.replace(architecture, biases=True)
        source = _ZeroBiases(source, architecture)
    fused: dict[str, list[tuple[ParameterPlace, NDArray[np.generic]]]] = {}
    for parameter in parameters(architecture):
        place = stored(parameter, architecture)
        if place is None:
            continue
        if place.experts:
            whole = source.tensor(parameter.name)
            each = whole.reshape(place.experts, -1, whole.shape[1])
            yield from zip(place.names, map(np.ascontiguousarray, each), strict=True)
            continue
        parts = fused.setdefault(place.name, [])
        parts.append((place, source.tensor(parameter.name)))
        if len(parts) == place.parts:
            joined = place.parts > 1 or place.stacked
            whole = assembled(parts) if joined else parts[0][1]
            yield place.name, np.ascontiguousarray(whole.T if place.transpose else whole)
            del fused[place.name]


class _ZeroBiases:
    """The weights of `source`, and zeros for the biases that it lacks."""

    def __init__(self, source: WeightSource, architecture: Architecture) -> None:
        self._source = source
        self._shapes = {p.name: p.shape for p in parameters(architecture)}

    def tensor(self, name: str) -> NDArray[np.generic]:
        if name.endswith(".bias"):
            return np.zeros(self._shapes[name], np.float32)
        return self._source.tensor(name)


def tensor_files(directory: Path) -> list[TensorFile]:
    """The safetensors files of `directory`. Raises `WeightsError`."""
    try:
        return [TensorFile(path) for path in weight_files(directory)]
    except OSError as error:
        raise WeightsError(
            f"{printable(str(error.filename))}: cannot be read: {error.strerror}"
        ) from None
    except (PlanError, TensorFileError) as error:
        raise WeightsError(str(error)) from None


def _prefixes_removed(
    files: list[TensorFile], architecture: Architecture
) -> dict[str, tuple[TensorFile, str]]:
    """Map names of the plain causal language model to tensors, without the prefixes of model
    wrappers."""
    named = {}
    inner, head = inner_prefix(architecture), f"{head_name(architecture)}."
    for file in files:
        for original in file.names():
            name = original
            if name.startswith(_IMAGES):
                continue
            if name.startswith("model.language_model."):
                name = "model." + name.removeprefix("model.language_model.")
            name = name.removeprefix("language_model.")
            if not name.startswith((inner, "lm_head.", head)):
                name = f"{inner}{name}"
            named[name.replace("lm_head.", head)] = (file, original)
    return named
