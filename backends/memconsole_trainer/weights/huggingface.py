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
from memconsole_trainer.weights.huggingface_names import (
    StoredParameter,
    assemble,
    extract,
    head_name,
    inner_prefix,
    stored_as,
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
    "visual.",
    "model.visual.",
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
        self._stored: dict[str, StoredParameter] = {}
        for parameter in self._parameters.values():
            if (one := stored_as(parameter, architecture)) is not None:
                self._stored[parameter.name] = one
        shapes = {
            stored_name: _shape(self._parameters[name], stored)
            for name, stored in self._stored.items()
            for stored_name in stored.names
        }
        absent = [f"{name} {shape}" for name, shape in shapes.items() if name not in self._named]
        if absent:
            raise WeightsError(f"{directory}: no tensor {_some_of(absent)}")
        for name, shape in shapes.items():
            file, original = self._named[name]
            if file.shape(original) != shape:
                raise WeightsError(
                    f"{directory}: {name} is {file.shape(original)}, the configuration says {shape}"
                )
        spare = [name for name in self._named if name not in shapes]
        copies = (f"{head_name(architecture)}.weight",) if architecture.tied_embeddings else ()
        self._check_copies(directory, [name for name in copies if name in spare])
        unknown = [name for name in spare if name not in copies and not _BUFFER.search(name)]
        if unknown:
            raise WeightsError(
                f"{directory}: {_some_of(unknown)} has no place in a {architecture.family} model "
                f"of this configuration"
            )
        count = sum(self._parameters[name].size for name in self._stored)
        files = f"{len(self._files)} file{'s' if len(self._files) > 1 else ''}"
        if any(name.startswith(_IMAGES) for file in self._files for name in file.names()):
            spare.append("what sees images")
        left_out = f"; not used: {_some_of(spare)}" if spare else ""
        self.read = f"{count:,} parameters read from {files}{left_out}"

    def _check_copies(self, directory: Path, copies: list[str]) -> None:
        """Raise `WeightsError` if a head beside a tied embedding is not its copy."""
        stored = self._stored["embedding.weight"]
        for name in copies:
            (file, original), (other, embedding) = self._named[name], self._named[stored.name]
            if not np.array_equal(file.tensor(original), other.tensor(embedding)):
                raise WeightsError(
                    f"{directory}: {name} differs from the embedding, but the configuration says that they are one "
                    "(tie_word_embeddings); set it to false in config.json to use both, or remove the head's tensor"
                )

    def tensor(self, name: str) -> NDArray[np.generic]:
        """The tensor of a canonical name. Matrices are (out, in); bfloat16 is converted to
        float32."""
        if name not in self._stored:
            parameter = self._parameters[name]
            return np.full(parameter.shape, parameter.fill, dtype=np.float32)
        stored, shape = self._stored[name], self._parameters[name].shape
        if stored.experts:
            return self._of_experts(stored, shape)
        file, original = self._named[stored.name]
        return extract(file.tensor(original, widen=True), stored, shape[0])

    def _of_experts(self, stored: StoredParameter, shape: tuple[int, ...]) -> NDArray[np.generic]:
        """The tensors of all experts, one below the other."""
        rows = shape[0] // stored.experts
        whole: NDArray[np.generic] | None = None
        for expert, name in enumerate(stored.names):
            file, original = self._named[name]
            part = file.tensor(original, widen=True)
            if whole is None:
                whole = np.empty(shape, part.dtype)
            elif whole.dtype != part.dtype:
                whole = whole.astype(np.float32)
            whole[expert * rows : (expert + 1) * rows] = part
        assert whole is not None
        return whole


def _shape(parameter: Parameter, stored: StoredParameter) -> tuple[int, ...]:
    """The shape of a stored tensor."""
    own, *columns = parameter.matrix_shape if stored.experts else parameter.shape
    rows = stored.rows(own)
    if stored.stacked:
        return (stored.stacked, rows // stored.stacked, *columns)
    shape = (rows, *columns)
    return shape[::-1] if stored.transpose else shape


def _some_of(names: list[str]) -> str:
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
    fused: dict[str, list[tuple[StoredParameter, NDArray[np.generic]]]] = {}
    for parameter in parameters(architecture):
        stored = stored_as(parameter, architecture)
        if stored is None:
            continue
        if stored.experts:
            whole = source.tensor(parameter.name)
            each = whole.reshape(stored.experts, -1, whole.shape[1])
            yield from zip(stored.names, map(np.ascontiguousarray, each), strict=True)
            continue
        parts = fused.setdefault(stored.name, [])
        parts.append((stored, source.tensor(parameter.name)))
        if len(parts) == stored.parts:
            joined = stored.parts > 1 or stored.stacked or stored.head
            whole = assemble(parts) if joined else parts[0][1]
            yield stored.name, np.ascontiguousarray(whole.T if stored.transpose else whole)
            del fused[stored.name]


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
