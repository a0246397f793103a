"""The decoder description that both backends build from, and the parameters it implies.

One `Architecture` covers GPT-2, Llama (with Mistral, Ministral 3, Qwen 2 and 3, SmolLM2 and 3, Granite 3, OLMo 2 and 3, EXAONE 4,
ERNIE 4.5, Seed-OSS), Phi-3 and 4, Gemma (1, 2 and 3), GLM-4, GPT-NeoX (Pythia), StarCoder2, and mixtures of experts
(Mixtral, Qwen3 MoE, OLMoE, Granite MoE).
`parameters()` lists every weight once, with canonical name, shape and initial scale. Counting, pricing, initializing,
loading and both backends' modules all read that list, so they cannot disagree.
Matrices are stored `(out, in)` and used as ``x @ W.T``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

import msgspec

from memconsole.plan.models import rotary
from memconsole.plan.models.model import Parameter
from memconsole.plan.models.rotary import RopeScaling

Family = Literal[
    "gpt2",
    "llama",
    "phi3",
    "gemma",
    "gemma2",
    "gemma3",
    "glm",
    "ernie4_5",
    "seed_oss",
    "ministral3",
    "gpt_neox",
    "starcoder2",
    "mixtral",
    "granite_moe",
]
Norm = Literal["layernorm", "rmsnorm"]
Activation = Literal["gelu", "gelu_tanh", "silu"]
"""`gelu` is exact, `gelu_tanh` its approximation (Hendrycks and Gimpel 2016)."""
Positions = Literal["learned", "rope"]


class Architecture(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, cache_hash=True
):
    """A decoder-only transformer, sizes in elements."""

    family: Family
    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate_size: int
    max_positions: int
    norm: Norm = "rmsnorm"
    norm_eps: float = 1e-6
    norm_unit_offset: bool = False
    """Gemma multiplies by (1 + weight) and stores weight around zero."""
    activation: Activation = "silu"
    gated_mlp: bool = True
    experts: int = 0
    """MLPs of a block, of which a router picks some for each token (Shazeer et al. 2017); 0: one MLP for all tokens.
    `intermediate_size` is that of one expert. Experts are gated and have no biases."""
    experts_per_token: int = 0
    """Experts that each token goes to."""
    normalized_shares: bool = False
    """Whether the shares of a token's picked experts are divided by their sum (Mixtral, Qwen3 MoE, Granite MoE)."""
    biases: bool = False
    """Bias on every projection and norm (GPT-2, GPT-NeoX, StarCoder2)."""
    projection_biases: bool = False
    """Bias on queries, keys and values alone (Qwen 2, Seed-OSS)."""
    positions: Positions = "rope"
    rope_theta: float = 10_000.0
    rope_local_theta: float = 10_000.0
    """Base for sliding-window layers (Gemma 3, OLMo 3)."""
    rope_scaling: RopeScaling | None = None
    scaled_local_layers: bool = False
    """Whether `rope_scaling` applies to sliding-window layers, too (Mistral, EXAONE 4), or to the others alone (Gemma 3,
    OLMo 3)."""
    rotary_size: int | None = None
    """Elements of each head that rotate, from its first one on (Phi-4-mini, GLM-4, GPT-NeoX); None: all."""
    unrotated_every: int = 0
    """Every n-th layer has no rotary positions (SmolLM3: 4). 0: every layer has. If there is a sliding window, these are
    the layers without it (EXAONE 4)."""
    tied_embeddings: bool = True
    scale_embeddings: bool = False
    """Gemma multiplies embeddings by sqrt(hidden_size)."""
    embedding_multiplier: float = 1.0
    """Multiplies embeddings (Granite)."""
    residual_multiplier: float = 1.0
    """Multiplies the outputs of attention and of the MLP before each residual sum (Granite)."""
    logits_scaling: float = 1.0
    """Divides the logits (Granite)."""
    query_key_norm: bool = False
    """RMS norm over head_size on queries and keys before rotation (Qwen3, Gemma 3, EXAONE 4)."""
    joint_query_key_norm: bool = False
    """This norm is over all heads together (OLMo 2)."""
    pre_norms: bool = True
    """A norm before attention and before the MLP; OLMo 2 and EXAONE 4 have none."""
    post_norms: bool = False
    """A norm after attention and after the MLP, before each residual sum (Gemma 2 and 3, OLMo 2, EXAONE 4, GLM-4-0414)."""
    parallel_residual: bool = False
    """The MLP reads the same input as attention, and both outputs are added to it (GPT-NeoX)."""
    attention_scale: float | None = None
    """Multiplies q·k; None means head_size ** -0.5."""
    attention_cap: float | None = None
    """Scores of attention x become cap · tanh(x / cap) (Gemma 2)."""
    logit_cap: float | None = None
    """The same for the logits."""
    sliding_window: int | None = None
    """Keys visible to a local layer, the current position included."""
    global_every: int = 1
    """Every n-th layer attends globally, the others locally (Gemma 2: 2, OLMo 3: 4, Gemma 3: 6). 1: all global; more than there are
    layers: all local (Mistral)."""
    auxiliary_rows: int = 0
    """Rows of a side-information embedding (gearhead's error codes), unused on plain text."""
    diagnostic_classes: int = 0
    """Outputs of an additional classification head, unused on plain text."""
    initializer_range: float = 0.02

    def is_local(self, layer: int) -> bool:
        """Whether `layer` (from 0) uses sliding-window attention."""
        return self.sliding_window is not None and (layer + 1) % self.global_every != 0

    @property
    def local_layers(self) -> int:
        """Layers with a sliding window, even if rows are shorter than the window."""
        return 0 if self.sliding_window is None else self.layers - self.layers // self.global_every

    def windowed(self, length: int) -> bool:
        """Whether the sliding window hides anything in rows of `length` tokens."""
        return self.sliding_window is not None and self.sliding_window < length

    def is_rotated(self, layer: int) -> bool:
        """Whether `layer` (from 0) rotates queries and keys."""
        plain = self.unrotated_every and (layer + 1) % self.unrotated_every == 0
        return self.positions == "rope" and not plain

    @property
    def mixes_layers(self) -> bool:
        """Whether layers may differ from one another in their window or rotation."""
        return self.sliding_window is not None or self.unrotated_every > 0

    @property
    def rotated_size(self) -> int:
        """Elements of each head that rotate in layers with rotary positions; 0 if positions are learned."""
        if self.positions == "learned":
            return 0
        return self.head_size if self.rotary_size is None else self.rotary_size

    def angles(self, length: int, *, local: bool) -> tuple[float, ...]:
        """Radians per token of each rotated pair in rows of `length` tokens, for global or local layers."""
        if local and not self.scaled_local_layers:
            return rotary.angles(self.rotated_size, self.rope_local_theta)
        theta = self.rope_local_theta if local else self.rope_theta
        return rotary.angles(self.rotated_size, theta, self.rope_scaling, length)

    def longest_with_same_angles(self, known: int, length: int) -> int:
        """The most tokens, up to `length`, that a row may have with the angles of a row of `known` tokens."""
        scaling = self.rope_scaling
        if scaling is None or scaling.kind != "longrope" or known > scaling.original_positions:
            return length
        return min(length, scaling.original_positions)

    def rotation_factor(self, *, local: bool) -> float:
        """Multiplies the cosines and sines of global or local layers."""
        if self.rope_scaling is None or (local and not self.scaled_local_layers):
            return 1.0
        return self.rope_scaling.attention_factor

    def scales_queries(self, length: int, *, local: bool) -> bool:
        """Whether rows of `length` tokens have queries that are multiplied (`RopeScaling.query_beta`)."""
        scaling = self.rope_scaling
        if scaling is None or (local and not self.scaled_local_layers):
            return False
        return scaling.query_beta > 0 and length > scaling.original_positions

    @property
    def biases_projections(self) -> bool:
        """Whether queries, keys and values have a bias."""
        return self.biases or self.projection_biases

    @property
    def scale(self) -> float:
        return self.head_size**-0.5 if self.attention_scale is None else self.attention_scale

    @property
    def embedding_scale(self) -> float:
        """What embeddings are multiplied by: sqrt(hidden_size) with `scale_embeddings`, else `embedding_multiplier`."""
        return self.hidden_size**0.5 if self.scale_embeddings else self.embedding_multiplier

    @property
    def query_width(self) -> int:
        return self.heads * self.head_size

    @property
    def key_width(self) -> int:
        return self.kv_heads * self.head_size

    @property
    def query_norm_size(self) -> int:
        """Elements that the norm of queries is over."""
        return self.query_width if self.joint_query_key_norm else self.head_size

    @property
    def key_norm_size(self) -> int:
        return self.key_width if self.joint_query_key_norm else self.head_size

    @property
    def active_share(self) -> float:
        """The share of its experts that a token goes to; 1 without experts."""
        return self.experts_per_token / self.experts if self.experts else 1.0

    def parameters(self) -> Iterator[Parameter]:
        """Every weight of the model; see the function `parameters`."""
        return parameters(self)


def parameters(architecture: Architecture) -> Iterator[Parameter]:
    """Every weight of the model in a fixed order: embeddings, layers from 0, final norm, head, extras.

    Residual outputs start smaller by 1/sqrt(2·layers) (GPT-2, Radford et al. 2019, §2.3).
    """
    a = architecture
    std = a.initializer_range
    yield Parameter("embedding.weight", (a.vocab_size, a.hidden_size), "embedding", std=std)
    if a.positions == "learned":
        yield Parameter("positions.weight", (a.max_positions, a.hidden_size), "position", std=std)
    for layer in range(a.layers):
        yield from _layer_parameters(a, layer)
    yield from _norm(a, "norm", None)
    if not a.tied_embeddings:
        yield Parameter("head.weight", (a.vocab_size, a.hidden_size), "head", std=std)
    if a.auxiliary_rows:
        shape = (a.auxiliary_rows, a.hidden_size)
        yield Parameter("auxiliary.weight", shape, "auxiliary", std=std, used=False)
    if a.diagnostic_classes:
        n = a.diagnostic_classes
        yield Parameter(
            "diagnostic_head.weight", (n, a.hidden_size), "auxiliary", std=std, used=False
        )
        yield Parameter("diagnostic_head.bias", (n,), "bias", used=False)


def _layer_parameters(architecture: Architecture, layer: int) -> Iterator[Parameter]:
    """The weights of one block; every block has the same names and shapes."""
    a = architecture
    residual_std = a.initializer_range / math.sqrt(2 * a.layers)
    prefix = f"layers.{layer}"
    if a.pre_norms:
        yield from _norm(a, f"{prefix}.attention_norm", layer)
    attention = f"{prefix}.attention"
    for name, width in (("query", a.query_width), ("key", a.key_width), ("value", a.key_width)):
        shape = (width, a.hidden_size)
        yield from _linear(a, f"{attention}.{name}", shape, layer, bias=a.biases_projections)
    yield from _linear(
        a, f"{attention}.output", (a.hidden_size, a.query_width), layer, residual_std
    )
    if a.query_key_norm:
        fill = 0.0 if a.norm_unit_offset else 1.0
        for name, size in (("query_norm", a.query_norm_size), ("key_norm", a.key_norm_size)):
            yield Parameter(f"{attention}.{name}.weight", (size,), "norm", layer, fill=fill)
    if a.post_norms:
        yield from _norm(a, f"{prefix}.attention_post_norm", layer)
    if a.pre_norms:
        yield from _norm(a, f"{prefix}.mlp_norm", layer)
    yield from (_experts if a.experts else _mlp)(a, f"{prefix}.mlp", layer, residual_std)
    if a.post_norms:
        yield from _norm(a, f"{prefix}.mlp_post_norm", layer)


def _mlp(a: Architecture, prefix: str, layer: int, residual_std: float) -> Iterator[Parameter]:
    if a.gated_mlp:
        yield from _linear(a, f"{prefix}.gate", (a.intermediate_size, a.hidden_size), layer)
    yield from _linear(a, f"{prefix}.up", (a.intermediate_size, a.hidden_size), layer)
    down = (a.hidden_size, a.intermediate_size)
    yield from _linear(a, f"{prefix}.down", down, layer, residual_std)


def _experts(a: Architecture, prefix: str, layer: int, residual_std: float) -> Iterator[Parameter]:
    """The router, and the matrices of all experts: those of one kind are one weight, one expert's rows after the other's."""
    e, f, h, std = a.experts, a.intermediate_size, a.hidden_size, a.initializer_range
    yield Parameter(f"{prefix}.router.weight", (e, h), "router", layer, std=std)
    for name, (rows, inputs), own in (
        ("gate", (f, h), std),
        ("up", (f, h), std),
        ("down", (h, f), residual_std),
    ):
        yield Parameter(
            f"{prefix}.{name}.weight", (e * rows, inputs), "experts", layer, std=own, matrices=e
        )


def _linear(
    a: Architecture,
    name: str,
    shape: tuple[int, int],
    layer: int,
    std: float | None = None,
    *,
    bias: bool = False,
) -> Iterator[Parameter]:
    yield Parameter(
        f"{name}.weight", shape, "matrix", layer, std=a.initializer_range if std is None else std
    )
    if a.biases or bias:
        yield Parameter(f"{name}.bias", (shape[0],), "bias", layer)


def _norm(a: Architecture, name: str, layer: int | None) -> Iterator[Parameter]:
    fill = 0.0 if a.norm_unit_offset else 1.0
    yield Parameter(f"{name}.weight", (a.hidden_size,), "norm", layer, fill=fill)
    if a.biases:
        yield Parameter(f"{name}.bias", (a.hidden_size,), "bias", layer)
