"""Maps canonical parameter names to tensors of Hugging Face checkpoints.

Both backends use the same mapping, for reading and for exporting.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
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
from memconsole_trainer.weights.tensorfile import TensorFile

NAMED = 3
"""The most tensors that a message names; it only counts the others."""


@dataclass(frozen=True)
class ParameterPlace:
    """Location of one canonical parameter: part `part` of the `parts` equal parts of `name`'s
    output rows."""

    name: str
    transpose: bool = False
    """Whether it is stored as (in, out), as in GPT-2's Conv1D."""
    part: int = 0
    parts: int = 1
    first: int | None = None
    """The first row of this part, if the parts are not equal; then `total` is the number of rows of all parts."""
    total: int | None = None

    def rows(self, own: int) -> int:
        """Output rows of the whole stored tensor, of which `own` are this parameter's."""
        return own * self.parts if self.total is None else self.total


_GPT2_TOP = {
    "embedding": "transformer.wte",
    "positions": "transformer.wpe",
    "norm": "transformer.ln_f",
    "head": "lm_head",
}
_GPT2_LAYER = {
    "attention_norm": "ln_1",
    "attention.query": "attn.c_attn",
    "attention.key": "attn.c_attn",
    "attention.value": "attn.c_attn",
    "attention.output": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}
_GPT2_PART = {"attention.query": 0, "attention.key": 1, "attention.value": 2}
_LLAMA_TOP = {"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
_LLAMA_LAYER = {
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "attention.query_norm": "self_attn.q_norm",
    "attention.key_norm": "self_attn.k_norm",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
_POST_NORMED_LAYER = _LLAMA_LAYER | {
    "attention_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}
_QKV, _GATE_UP = (
    ("self_attn.qkv_proj", ("attention.query", "attention.key", "attention.value")),
    ("mlp.gate_up_proj", ("mlp.gate", "mlp.up")),
)
_PHI3_JOINED = {name: joined for joined in (_QKV, _GATE_UP) for name in joined[1]}
"""The stored module of each joined matrix, with the matrices that it contains, in the order of their rows."""
_BUFFER = re.compile(r"(rotary_emb\.inv_freq|attn\.bias|attn\.masked_bias)$")
"""Constants that older checkpoints hold in addition to the weights."""
_IMAGES = (
    "vision_tower.",
    "multi_modal_projector.",
    "model.vision_tower.",
    "model.multi_modal_projector.",
)
"""What a model that also sees images has beside its language model."""


def stored(parameter: Parameter, architecture: Architecture) -> ParameterPlace | None:
    """Location of `parameter` in a Hugging Face checkpoint of this family; None if it is not stored
    there."""
    if parameter.role == "auxiliary" or parameter.name.startswith("diagnostic_head"):
        return None
    stem, _, kind = parameter.name.rpartition(".")
    gpt2 = architecture.family == "gpt2"
    if parameter.layer is None:
        return ParameterPlace(f"{(_GPT2_TOP if gpt2 else _LLAMA_TOP)[stem]}.{kind}")
    inner = stem.removeprefix(f"layers.{parameter.layer}.")
    if gpt2:
        matrix = kind == "weight" and parameter.role == "matrix"
        fused = inner in _GPT2_PART
        return ParameterPlace(
            f"transformer.h.{parameter.layer}.{_GPT2_LAYER[inner]}.{kind}",
            transpose=matrix,
            part=_GPT2_PART.get(inner, 0),
            parts=3 if fused else 1,
        )
    if architecture.family == "phi3" and inner in _PHI3_JOINED:
        return _joined(parameter.layer, inner, kind, architecture)
    table = _POST_NORMED_LAYER if architecture.post_norms else _LLAMA_LAYER
    return ParameterPlace(f"model.layers.{parameter.layer}.{table[inner]}.{kind}")


def _joined(layer: int, inner: str, kind: str, a: Architecture) -> ParameterPlace:
    """Location of a matrix of Phi-3, which is stored below others of the same inputs."""
    module, names = _PHI3_JOINED[inner]
    widths = {"attention.query": a.query_width, "attention.key": a.key_width,
              "attention.value": a.key_width}  # fmt: skip
    sizes = [widths.get(name, a.intermediate_size) for name in names]
    part = names.index(inner)
    return ParameterPlace(
        f"model.layers.{layer}.{module}.{kind}",
        part=part,
        parts=len(names),
        first=sum(sizes[:part]),
        total=sum(sizes),
    )


class HuggingFaceWeights:
    """A `WeightSource` over a directory of safetensors: one file, or several with an index.

    Raises `WeightsError` if the directory has no safetensors, lacks weights, has one of another
    shape, or has weights that the architecture does not use (its logits would be wrong).
    """

    read: str
    """How many parameters were found, and which tensors are not used because they are not separate weights."""

    def __init__(self, directory: Path, architecture: Architecture) -> None:
        self._directory = directory
        self._files = tensor_files(directory)
        self._named = _prefixes_removed(self._files, architecture)
        self._parameters = {p.name: p for p in parameters(architecture)}
        self._places: dict[str, ParameterPlace] = {}
        for parameter in self._parameters.values():
            place = stored(parameter, architecture)
            if place is not None:
                self._places[parameter.name] = place
        used = {place.name for place in self._places.values()}
        absent = [
            name
            for name in dict.fromkeys(p.name for p in self._places.values())
            if name not in self._named
        ]
        if absent:
            raise WeightsError(f"{directory}: no tensor {_listed(absent)}")
        for name, place in self._places.items():
            self._check(self._parameters[name], place)
        spare = [name for name in self._named if name not in used]
        copies = ("lm_head.weight",) if architecture.tied_embeddings else ()
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
        place = self._places[name]
        file, original = self._named[place.name]
        return taken(file.tensor(original, widen=True), place, self._parameters[name].shape[0])

    def _check(self, parameter: Parameter, place: ParameterPlace) -> None:
        file, original = self._named[place.name]
        shape = file.shape(original)
        wanted = (place.rows(parameter.shape[0]), *parameter.shape[1:])
        found = shape[::-1] if place.transpose else shape
        if found != wanted:
            raise WeightsError(
                f"{self._directory}: {place.name} is {shape}, the configuration says "
                f"{wanted[::-1] if place.transpose else wanted}"
            )


def _listed(names: list[str]) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - NAMED:,} more" if len(names) > NAMED else ""
    return printable(", ".join(names[:NAMED])) + more


def taken(whole: NDArray[np.generic], place: ParameterPlace, rows: int) -> NDArray[np.generic]:
    """Extract the canonical tensor of `rows` rows at `place` from the stored tensor `whole`."""
    if place.transpose:
        whole = whole.T
    first = place.part * rows if place.first is None else place.first
    return np.ascontiguousarray(whole[first : first + rows])


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
    fused: dict[str, list[NDArray[np.generic]]] = {}
    for parameter in parameters(architecture):
        place = stored(parameter, architecture)
        if place is None:
            continue
        parts = fused.setdefault(place.name, [])
        parts.append(source.tensor(parameter.name))
        if len(parts) == place.parts:
            whole = np.concatenate(parts) if place.parts > 1 else parts[0]
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
    for file in files:
        for original in file.names():
            name = original
            if name.startswith(_IMAGES):
                continue
            if name.startswith("model.language_model."):
                name = "model." + name.removeprefix("model.language_model.")
            name = name.removeprefix("language_model.")
            if architecture.family == "gpt2":
                if not name.startswith(("transformer.", "lm_head.")):
                    name = f"transformer.{name}"
            elif not name.startswith(("model.", "lm_head.")):
                name = f"model.{name}"
            named[name] = (file, original)
    return named
