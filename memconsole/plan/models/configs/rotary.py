"""Reads the rotary positions of a Hugging Face config.json.

Two spellings are in use: `rope_theta` and `rope_scaling` (transformers 4) and `rope_parameters` (transformers 5).
"""

from __future__ import annotations

from collections.abc import Mapping

from memconsole.plan.models.configs.reader import Config, refusal
from memconsole.plan.models.rotary import (
    RopeScaling,
    longrope_attention_factor,
    yarn_attention_factor,
)

KINDS = ("default", "linear", "llama3", "yarn", "longrope")
WITH_IMAGES = ("qwen2_5_vl_text", "qwen3_vl_text")
"""Model types whose positions have parts for rows and columns of images (M-RoPE). Those of texts are plain."""
PARTIAL = ("phi3", "glm", "glm4", "gpt_neox")
"""Model types of which only a part of each head may rotate."""


def rope(c: Config, layer_type: str, default_theta: float) -> tuple[float, RopeScaling | None]:
    """(theta, scaling) of one kind of layer. Raises `PlanError` if the two spellings disagree."""
    parameters = c.table("rope_parameters")
    older = Config(c.table("rope_scaling"), c.where)
    if parameters:
        nested = parameters.get(layer_type)
        settings = Config(nested if isinstance(nested, Mapping) else parameters, c.where)
        theta = settings.number("rope_theta", c.number("rope_theta", default_theta))
        scaling = _scaling(settings, c)
        if layer_type == "full_attention" and c.table("rope_scaling") not in ({}, parameters):
            other = _scaling(older, c)
            if other != scaling:
                kind = other.kind if other else "default"
                raise refusal(c.where, "rope_scaling", kind, "the same as in rope_parameters")
    elif layer_type == "sliding_attention":
        return c.number("rope_local_base_freq", default_theta), None
    else:
        theta, scaling = c.number("rope_theta", default_theta), _scaling(older, c)
    if scaling is not None and scaling.kind == "yarn" and theta <= 1:
        raise refusal(c.where, "rope_theta", theta, "more than 1")
    return theta, scaling


def rotary_size(c: Config, head_size: int, key: str, default: float) -> int | None:
    """Elements of each head that rotate; None if all do. `key` names their share beside the scaling, which is `default` if
    the file does not say. Raises `PlanError`."""
    settings = Config(c.table("rope_parameters") or c.table("rope_scaling"), c.where)
    inner_key = "partial_rotary_factor"
    share = settings.number(inner_key, c.number(key, default))
    size = int(head_size * share)
    if not 2 <= size <= head_size or size % 2:
        expected = f"a share that leaves an even number of the {head_size} elements of a head"
        raise refusal(c.where, key if settings.missing(inner_key) else inner_key, share, expected)
    return None if size == head_size else size


def _scaling(settings: Config, outer: Config) -> RopeScaling | None:
    """The scaling in a table of rotary settings of the file `outer`; None if there is none. Raises `PlanError`."""
    model_type = outer.text("model_type", "")
    share = settings.number("partial_rotary_factor", 1.0)
    if share != 1 and model_type not in PARTIAL:
        raise refusal(
            settings.where, "partial_rotary_factor", share, "1: anything else is not supported"
        )
    kind = settings.text("rope_type", settings.text("type", "default"))
    if model_type == "phi3" and kind in ("su", "yarn"):  # older names of what Phi-3 does
        kind = "longrope"
    if model_type in WITH_IMAGES and kind == "mrope":
        return None
    if kind not in KINDS:
        expected = f"{', '.join(KINDS[:-1])} or {KINDS[-1]}"
        raise refusal(settings.where, "rope_type", kind, expected)
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling(kind="linear", factor=settings.number("factor"))
    positions, original = _positions(settings, outer)
    if kind == "llama3":
        return _llama3(settings, original)
    if original == 1:
        raise refusal(settings.where, "original_max_position_embeddings", 1, "more than 1")
    make = _yarn if kind == "yarn" else _longrope
    return make(settings, positions / original, original)


def _positions(settings: Config, outer: Config) -> tuple[int, int]:
    """The longest rows of the model, and those of pretraining, which may be named beside the scaling: that name comes
    first."""
    phi3 = outer.text("model_type", "") == "phi3"
    positions = outer.size("max_position_embeddings", 4096 if phi3 else 2048)
    original = settings.size("original_max_position_embeddings", 4096 if phi3 else positions)
    return positions, outer.size("original_max_position_embeddings", 4096 if phi3 else original)


def _llama3(settings: Config, original: int) -> RopeScaling:
    low, high = settings.number("low_freq_factor"), settings.number("high_freq_factor")
    if high <= low:
        expected = f"more than low_freq_factor = {low}"
        raise refusal(settings.where, "high_freq_factor", high, expected)
    return RopeScaling(
        kind="llama3",
        factor=settings.number("factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_positions=original,
    )


def _longrope(settings: Config, lengthening: float, original: int) -> RopeScaling:
    factor = settings.number("factor", lengthening)
    default = longrope_attention_factor(factor, original)
    return RopeScaling(
        kind="longrope",
        factor=factor,
        original_positions=original,
        attention_factor=settings.number("attention_factor", default),
        short_factors=settings.numbers("short_factor"),
        long_factors=settings.numbers("long_factor"),
    )


def _yarn(settings: Config, lengthening: float, original: int) -> RopeScaling:
    factor = settings.number("factor", lengthening)
    default = yarn_attention_factor(factor)
    above, below = settings.amount("mscale"), settings.amount("mscale_all_dim")
    if above and below:
        default = yarn_attention_factor(factor, above) / yarn_attention_factor(factor, below)
    return RopeScaling(
        kind="yarn",
        factor=factor,
        original_positions=original,
        beta_fast=_turns(settings, "beta_fast", 32.0),
        beta_slow=_turns(settings, "beta_slow", 1.0),
        truncate=settings.flag("truncate", True),
        attention_factor=settings.number("attention_factor", default),
        query_beta=settings.amount("llama_4_scaling_beta"),
    )


def _turns(settings: Config, key: str, default: float) -> float:
    value = settings.number(key, default)
    if not 1e-6 <= value <= 1e6:
        raise refusal(settings.where, key, value, "a number from 1e-6 to 1e6")
    return value
