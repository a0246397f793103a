"""Maps canonical parameter names to tensors of Hugging Face checkpoints.

Both backends use the same mapping, for reading and for exporting.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memconsole.plan.models.architecture import Architecture
from memconsole.plan.models.model import Parameter


@dataclass(frozen=True)
class StoredParameter:
    """How a checkpoint stores one canonical parameter: as part `part` of the `parts` equal parts of `name`'s
    output rows."""

    name: str
    transpose: bool = False
    """Whether it is stored as (in, out), as in GPT-2's Conv1D."""
    part: int = 0
    parts: int = 1
    first: int | None = None
    """The first row of this part, if the parts are not equal; then `total` is the number of rows of all parts."""
    total: int | None = None
    alternating: int = 0
    """Rows of a part after which those of the next one follow; 0 if all rows of a part are together."""
    head: int = 0
    """Rows of each head of queries or keys whose rotated pairs are neighbours in the stored tensor, where this project pairs
    element i with i + rotated/2; 0 if pairs are stored as here."""
    rotated: int = 0
    """How many rows of each such head rotate, from its first one on."""
    experts: int = 0
    """If not 0, each expert's rows are a tensor of their own, called `name` with the expert's number in place of `{}`."""
    stacked: int = 0
    """If not 0, the stored tensor is (stacked, rows, in): the matrices of so many experts."""

    @property
    def names(self) -> tuple[str, ...]:
        """The stored tensors, in the order of their rows."""
        return tuple(self.name.format(i) for i in range(self.experts)) or (self.name,)

    def rows(self, own: int) -> int:
        """Output rows of the whole stored tensor, of which `own` are this parameter's."""
        return own * self.parts if self.total is None else self.total

    def own_rows(self, own: int) -> slice | NDArray[np.intp]:
        """The indices of these `own` rows in the stored tensor."""
        if self.alternating:
            groups = np.arange(self.rows(own)).reshape(-1, self.parts, self.alternating)
            return groups[:, self.part].reshape(-1)
        if self.head:
            pairs, rest = np.arange(self.rotated), np.arange(self.rotated, self.head)
            of_a_head = np.concatenate([pairs[::2], pairs[1::2], rest])
            return (np.arange(0, own, self.head)[:, None] + of_a_head).reshape(-1)
        first = self.part * own if self.first is None else self.first
        return slice(first, first + own)


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
_FUSED = {"attention.query": 0, "attention.key": 1, "attention.value": 2}
"""The parts of the matrix of queries, keys and values of GPT-2 and GPT-NeoX."""
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
_GLM_LAYER = _LLAMA_LAYER | {
    "attention_post_norm": "post_self_attn_layernorm",
    "mlp_post_norm": "post_mlp_layernorm",
}
_STARCODER2_LAYER = _LLAMA_LAYER | {"mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"}
_LAYER = {"glm": _GLM_LAYER, "starcoder2": _STARCODER2_LAYER}
"""The modules of a layer of families that have names of their own."""
_EXPERTS = {
    "mlp.router": "mlp.gate",
    "mlp.gate": "mlp.experts.{}.gate_proj",
    "mlp.up": "mlp.experts.{}.up_proj",
    "mlp.down": "mlp.experts.{}.down_proj",
}
_MIXTRAL_EXPERTS = {
    "mlp.router": "block_sparse_moe.gate",
    "mlp.gate": "block_sparse_moe.experts.{}.w1",
    "mlp.up": "block_sparse_moe.experts.{}.w3",
    "mlp.down": "block_sparse_moe.experts.{}.w2",
}
_GRANITE_EXPERTS = {
    "mlp.router": "block_sparse_moe.router.layer",
    "mlp.gate": "block_sparse_moe.input_linear",
    "mlp.up": "block_sparse_moe.input_linear",
    "mlp.down": "block_sparse_moe.output_linear",
}
_NEOX_TOP = {
    "embedding": "gpt_neox.embed_in",
    "norm": "gpt_neox.final_layer_norm",
    "head": "embed_out",
}
_NEOX_LAYER = {
    "attention_norm": "input_layernorm",
    "attention.query": "attention.query_key_value",
    "attention.key": "attention.query_key_value",
    "attention.value": "attention.query_key_value",
    "attention.output": "attention.dense",
    "mlp_norm": "post_attention_layernorm",
    "mlp.up": "mlp.dense_h_to_4h",
    "mlp.down": "mlp.dense_4h_to_h",
}
_QKV, _GATE_UP = (
    ("self_attn.qkv_proj", ("attention.query", "attention.key", "attention.value")),
    ("mlp.gate_up_proj", ("mlp.gate", "mlp.up")),
)
_JOINED: dict[str, dict[str, tuple[str, tuple[str, ...]]]] = {
    "phi3": {name: joined for joined in (_QKV, _GATE_UP) for name in joined[1]},
    "glm": dict.fromkeys(_GATE_UP[1], _GATE_UP),
}
"""By family: the stored module of each joined matrix, with the matrices that it contains, in the order of their rows."""
_NEIGHBOURS = ("glm", "ernie4_5")
"""Families that rotate pairs of neighbouring elements of queries and keys."""
_TOP = {"gpt2": _GPT2_TOP, "gpt_neox": _NEOX_TOP}


def head_name(architecture: Architecture) -> str:
    """The module of the head in a checkpoint."""
    return _top(architecture)["head"]


def inner_prefix(architecture: Architecture) -> str:
    """The prefix of the names of all other modules."""
    return _top(architecture)["norm"].partition(".")[0] + "."


def _top(a: Architecture) -> dict[str, str]:
    return _TOP.get(a.family, _LLAMA_TOP)


def stored_as(parameter: Parameter, architecture: Architecture) -> StoredParameter | None:
    """How a Hugging Face checkpoint of this family stores `parameter`; None if it does not."""
    if parameter.role == "auxiliary" or parameter.name.startswith("diagnostic_head"):
        return None
    stem, _, kind = parameter.name.rpartition(".")
    family = architecture.family
    if parameter.layer is None:
        return StoredParameter(f"{_top(architecture)[stem]}.{kind}")
    inner = stem.removeprefix(f"layers.{parameter.layer}.")
    part, parts = (_FUSED[inner], len(_FUSED)) if inner in _FUSED else (0, 1)
    if family == "gpt2":
        name = f"transformer.h.{parameter.layer}.{_GPT2_LAYER[inner]}.{kind}"
        matrix = kind == "weight" and parameter.role == "matrix"
        return StoredParameter(name, transpose=matrix, part=part, parts=parts)
    if family == "gpt_neox":
        name = f"gpt_neox.layers.{parameter.layer}.{_NEOX_LAYER[inner]}.{kind}"
        by_head = architecture.head_size if parts > 1 else 0
        return StoredParameter(name, part=part, parts=parts, alternating=by_head)
    if inner in _JOINED.get(family, ()):
        return _joined_matrix(parameter.layer, inner, kind, architecture)
    usual = _POST_NORMED_LAYER if architecture.post_norms else _LLAMA_LAYER
    table = _LAYER.get(family, usual)
    if family == "granite_moe" and inner in _GRANITE_EXPERTS:
        return _granite_experts(parameter, _GRANITE_EXPERTS[inner], architecture)
    if architecture.experts:
        table = table | (_MIXTRAL_EXPERTS if family == "mixtral" else _EXPERTS)
    name = f"model.layers.{parameter.layer}.{table[inner]}.{kind}"
    if family in _NEIGHBOURS and inner in ("attention.query", "attention.key"):
        a = architecture
        return StoredParameter(name, head=a.head_size, rotated=a.rotated_size)
    each = architecture.experts if parameter.role == "experts" else 0
    return StoredParameter(name, experts=each)


def _joined_matrix(layer: int, inner: str, kind: str, a: Architecture) -> StoredParameter:
    """How Phi-3 and GLM-4 store a matrix: in one tensor with others of the same inputs, its rows below theirs."""
    module, names = _JOINED[a.family][inner]
    widths = {"attention.query": a.query_width, "attention.key": a.key_width,
              "attention.value": a.key_width}  # fmt: skip
    sizes = [widths.get(name, a.intermediate_size) for name in names]
    part = names.index(inner)
    return StoredParameter(
        f"model.layers.{layer}.{module}.{kind}",
        part=part,
        parts=len(names),
        first=sum(sizes[:part]),
        total=sum(sizes),
    )


def _granite_experts(parameter: Parameter, module: str, a: Architecture) -> StoredParameter:
    """How Granite MoE stores a router or the experts' matrices: those of one kind are one tensor, in which each expert's
    gate is followed by its up."""
    name = f"model.layers.{parameter.layer}.{module}.weight"
    if parameter.role != "experts":
        return StoredParameter(name)
    if module.endswith("output_linear"):
        return StoredParameter(name, stacked=a.experts)
    part = int(".up." in parameter.name)
    inner = a.intermediate_size
    return StoredParameter(name, part=part, parts=2, alternating=inner, stacked=a.experts)


def extract(whole: NDArray[np.generic], stored: StoredParameter, rows: int) -> NDArray[np.generic]:
    """Extract the canonical tensor of `rows` rows that is `stored` in the tensor `whole`."""
    if stored.transpose:
        whole = whole.T
    if stored.stacked:
        whole = whole.reshape(-1, whole.shape[-1])
    return np.ascontiguousarray(whole[stored.own_rows(rows)])


def assemble(parts: list[tuple[StoredParameter, NDArray[np.generic]]]) -> NDArray[np.generic]:
    """The stored tensor of its parts, which may be one, not transposed."""
    stored, first = parts[0]
    whole = np.empty((stored.rows(len(first)), *first.shape[1:]), first.dtype)
    for stored, array in parts:
        whole[stored.own_rows(len(array))] = array
    return whole.reshape(stored.stacked, -1, whole.shape[1]) if stored.stacked else whole
