"""Reads config.json of Gemma 1, 2 and 3."""

from __future__ import annotations

from typing import Any

from memconsole.plan.models.architecture import Architecture
from memconsole.plan.models.configs.common import layers_with_window, rms_decoder
from memconsole.plan.models.configs.layernorm import TANH_GELU
from memconsole.plan.models.configs.reader import Config, refusal
from memconsole.plan.models.configs.rotary import rope

_GEMMA: dict[str, Any] = {
    "activation": "gelu_tanh",
    "norm_unit_offset": True,
    "scale_embeddings": True,
    "head_size": 256,
    "tied_embeddings": True,
}
"""What all generations of Gemma have, the head's size and tied embeddings unless the file says otherwise."""


def gemma(c: Config) -> Architecture:
    # Files from before transformers 4.39 say "gelu", but the model was trained with the tanh approximation.
    if c.missing("hidden_activation"):
        c.only("hidden_act", TANH_GELU[1], (*TANH_GELU, "gelu"))
    else:
        c.only("hidden_activation", None, TANH_GELU)
    theta, scaling = rope(c, "full_attention", 10_000.0)
    return rms_decoder(
        c,
        family="gemma",
        **_GEMMA,
        rope_theta=theta,
        rope_scaling=scaling,
        max_positions=8192,
    )


def gemma2(c: Config) -> Architecture:
    c.only("hidden_activation", TANH_GELU[1], TANH_GELU)
    theta, scaling = rope(c, "full_attention", 10_000.0)
    window, every = layers_with_window(c, 2)
    return rms_decoder(
        c,
        family="gemma2",
        **_GEMMA,
        post_norms=True,
        attention_scale=c.number("query_pre_attn_scalar", 256.0) ** -0.5,
        attention_cap=_cap(c, "attn_logit_softcapping", 50.0),
        logit_cap=_cap(c, "final_logit_softcapping", 30.0),
        rope_theta=theta,
        rope_local_theta=theta,
        rope_scaling=scaling,
        scaled_local_layers=window is not None and scaling is not None,
        sliding_window=window,
        global_every=every,
        max_positions=8192,
    )


def _cap(c: Config, key: str, default: float) -> float | None:
    """A cap of scores or logits; null is none."""
    return None if c.says_none(key) else c.number(key, default)


def gemma3(c: Config) -> Architecture:
    c.only("hidden_activation", TANH_GELU[1], TANH_GELU)
    theta, scaling = rope(c, "full_attention", 1_000_000.0)
    local_theta, local_scaling = rope(c, "sliding_attention", 10_000.0)
    if local_scaling is not None:
        raise refusal(c.where, "rope_parameters", local_scaling.kind, "no scaling of local layers")
    window, every = layers_with_window(c, 6)
    return rms_decoder(
        c,
        family="gemma3",
        **_GEMMA,
        query_key_norm=True,
        post_norms=True,
        attention_scale=c.number("query_pre_attn_scalar", 256.0) ** -0.5,
        rope_theta=theta,
        rope_local_theta=local_theta,
        rope_scaling=scaling,
        sliding_window=window,
        global_every=every,
        max_positions=131_072,
    )
