"""Reads config.json of mixtures of experts: Mixtral, Qwen3 MoE, OLMoE and Granite 3 MoE."""

from __future__ import annotations

import msgspec

from memconsole.plan.models.architecture import Architecture
from memconsole.plan.models.configs.common import with_window
from memconsole.plan.models.configs.llama import granite, llama
from memconsole.plan.models.configs.reader import Config, refusal


def mixtral(c: Config) -> Architecture:
    """Mixtral: a Mistral with experts."""
    decoder = llama(c, max_positions=131_072, default_theta=1_000_000.0, norm_eps=1e-5)
    decoder = msgspec.structs.replace(decoder, family="mixtral")
    return with_window(c, _with_experts(c, decoder, (8, 2), normalized=True))


def qwen3_moe(c: Config) -> Architecture:
    """Qwen3 MoE: a Qwen3 with experts in every layer."""
    inner = c.size("moe_intermediate_size", 768)
    decoder = llama(c, query_key_norm=True, max_positions=32_768, intermediate_size=inner)
    return _with_experts(c, decoder, (128, 8), normalized=c.flag("norm_topk_prob", False))


def olmoe(c: Config) -> Architecture:
    """OLMoE: a Llama with experts, and norms of all queries and all keys."""
    decoder = llama(
        c, query_key_norm=True, joint_query_key_norm=True, max_positions=4096, norm_eps=1e-5
    )
    return _with_experts(c, decoder, (64, 8), normalized=c.flag("norm_topk_prob", False))


def granite_moe(c: Config) -> Architecture:
    """Granite 3 MoE: a Granite with experts."""
    decoder = msgspec.structs.replace(granite(c), family="granite_moe")
    return _with_experts(c, decoder, (8, 2), normalized=True)


def _with_experts(
    c: Config, decoder: Architecture, usual: tuple[int, int], *, normalized: bool
) -> Architecture:
    """`decoder` with experts in every block. `usual`: how many there are, and how many of them a token goes to, if the file
    does not say. Raises `PlanError`."""
    count = c.size("num_experts", c.size("num_local_experts", usual[0]))
    picked = c.size("num_experts_per_tok", usual[1])
    if picked > count:
        raise refusal(c.where, "num_experts_per_tok", picked, f"at most the {count} experts")
    return msgspec.structs.replace(
        decoder, experts=count, experts_per_token=picked, normalized_shares=normalized
    )
