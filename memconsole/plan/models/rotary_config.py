"""Reads the rotary positions of a Hugging Face config.json.

Two spellings are in use: `rope_theta` and `rope_scaling` (transformers 4) and `rope_parameters` (transformers 5).
"""

from __future__ import annotations

from collections.abc import Mapping

from memconsole.plan.models.config_reader import Config, refusal
from memconsole.plan.models.rotary import (
    RopeScaling,
    longrope_attention_factor,
    yarn_attention_factor,
)

KINDS = ("default", "linear", "llama3", "yarn", "longrope")
PARTIAL = ("phi3", "gpt_neox")
"""Model types of which only a part of each head may rotate."""


def rope(c: Config, layer_type: str, default_theta: float) -> tuple[float, RopeScaling | None]:
    """(theta, scaling) of one kind of layer. Raises `PlanError` if the two spellings disagree."""
    parameters = c.table("rope_parameters")
    older = Config(c.table("rope_scaling"), c.where)
    if parameters:
        nested = parameters.get(layer_type)
        at = Config(nested if isinstance(nested, Mapping) else parameters, c.where)
        theta = at.number("rope_theta", c.number("rope_theta", default_theta))
        scaling = _scaling(at, c)
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


def rotary_size(c: Config, head_size: int, key: str, usual: float) -> int | None:
    """Elements of each head that rotate; None if all do. `key` names their share beside the scaling, which is `usual` if
    the file does not say."""
    at = Config(c.table("rope_parameters") or c.table("rope_scaling"), c.where)
    inside = "partial_rotary_factor"
    part = at.number(inside, c.number(key, usual))
    size = int(head_size * part)
    if not 2 <= size <= head_size or size % 2:
        expected = f"a share that leaves an even number of the {head_size} elements of a head"
        raise refusal(c.where, key if at.missing(inside) else inside, part, expected)
    return None if size == head_size else size


def _scaling(at: Config, outer: Config) -> RopeScaling | None:
    model_type = outer.text("model_type", "")
    phi3 = model_type == "phi3"
    part = at.number("partial_rotary_factor", 1.0)
    if part != 1 and model_type not in PARTIAL:
        raise refusal(at.where, "partial_rotary_factor", part, "1: anything else is not supported")
    kind = at.text("rope_type", at.text("type", "default"))
    if phi3 and kind in ("su", "yarn"):  # older names of what Phi-3 does
        kind = "longrope"
    if kind not in KINDS:
        raise refusal(at.where, "rope_type", kind, f"{', '.join(KINDS[:-1])} or {KINDS[-1]}")
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling(kind="linear", factor=at.number("factor"))
    # The longest rows of pretraining may be named beside the scaling, and that name comes first.
    positions = outer.size("max_position_embeddings", 4096 if phi3 else 2048)
    original = at.size("original_max_position_embeddings", 4096 if phi3 else positions)
    original = outer.size("original_max_position_embeddings", 4096 if phi3 else original)
    if kind == "llama3":
        low, high = at.number("low_freq_factor"), at.number("high_freq_factor")
        if high <= low:
            raise refusal(at.where, "high_freq_factor", high, f"more than low_freq_factor = {low}")
        return RopeScaling(
            kind="llama3",
            factor=at.number("factor"),
            low_freq_factor=low,
            high_freq_factor=high,
            original_positions=original,
        )
    if original == 1:
        raise refusal(at.where, "original_max_position_embeddings", 1, "more than 1")
    if kind == "yarn":
        return _yarn(at, positions / original, original)
    factor = at.number("factor", positions / original)
    usual = longrope_attention_factor(factor, original)
    return RopeScaling(
        kind="longrope",
        factor=factor,
        original_positions=original,
        attention_factor=at.number("attention_factor", usual),
        short_factors=at.numbers("short_factor"),
        long_factors=at.numbers("long_factor"),
    )


def _yarn(at: Config, longer: float, original: int) -> RopeScaling:
    factor = at.number("factor", longer)
    usual = yarn_attention_factor(factor)
    if not at.missing("mscale") and not at.missing("mscale_all_dim"):
        above, below = (at.number(key) for key in ("mscale", "mscale_all_dim"))
        usual = yarn_attention_factor(factor, above) / yarn_attention_factor(factor, below)
    return RopeScaling(
        kind="yarn",
        factor=factor,
        original_positions=original,
        beta_fast=_turns(at, "beta_fast", 32.0),
        beta_slow=_turns(at, "beta_slow", 1.0),
        truncate=at.flag("truncate", True),
        attention_factor=at.number("attention_factor", usual),
    )


def _turns(at: Config, key: str, default: float) -> float:
    value = at.number(key, default)
    if not 1e-6 <= value <= 1e6:
        raise refusal(at.where, key, value, "a number from 1e-6 to 1e6")
    return value
