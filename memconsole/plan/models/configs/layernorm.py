"""Reads config.json of the families with layer norms and biases: GPT-2, GPT-NeoX and StarCoder2."""

from __future__ import annotations

from memconsole.plan.models.architecture import Activation, Architecture
from memconsole.plan.models.configs.common import all_local
from memconsole.plan.models.configs.reader import Config, refusal
from memconsole.plan.models.configs.rotary import rope, rotary_size

TANH_GELU = ("gelu_new", "gelu_pytorch_tanh")
"""Names of the tanh approximation of GELU."""


def _gelu(c: Config, key: str, usual: str, *others: str) -> Activation:
    """The kind of GELU that `key` names, exact or by the tanh approximation, which may have `others` as names. `usual`: its
    name if the file has none. Raises `PlanError`."""
    named = c.text(key, usual)
    allowed = ("gelu", *TANH_GELU, *others)
    if named not in allowed:
        raise refusal(c.where, key, named, " or ".join(allowed))
    return "gelu" if named == "gelu" else "gelu_tanh"


def gpt2(c: Config) -> Architecture:
    hidden, heads = c.size("n_embd", 768), c.size("n_head", 12)
    activation = _gelu(c, "activation_function", "gelu_new")
    return Architecture(
        family="gpt2",
        vocab_size=c.size("vocab_size", 50_257),
        hidden_size=hidden,
        layers=c.size("n_layer", 12),
        heads=heads,
        kv_heads=heads,
        head_size=c.quotient("n_embd", hidden, heads),
        intermediate_size=c.size("n_inner", 4 * hidden),
        max_positions=c.size("n_positions", 1024),
        norm="layernorm",
        norm_eps=c.number("layer_norm_epsilon", 1e-5),
        activation=activation,
        gated_mlp=False,
        biases=True,
        positions="learned",
        tied_embeddings=c.flag("tie_word_embeddings", True),
        initializer_range=c.number("initializer_range", 0.02),
    )


def gpt_neox(c: Config) -> Architecture:
    """GPT-NeoX (Pythia): attention and MLP side by side, and rotary positions in a part of each head."""
    hidden, heads = c.size("hidden_size"), c.size("num_attention_heads")
    activation = _gelu(c, "hidden_act", "gelu", "gelu_fast")
    if not c.flag("attention_bias", True):
        raise refusal(c.where, "attention_bias", False, "true: anything else is not supported")
    theta, scaling = rope(c, "full_attention", c.number("rotary_emb_base", 10_000.0))
    head_size = c.quotient("hidden_size", hidden, heads)
    return Architecture(
        family="gpt_neox",
        vocab_size=c.size("vocab_size"),
        hidden_size=hidden,
        layers=c.size("num_hidden_layers"),
        heads=heads,
        kv_heads=heads,
        head_size=head_size,
        intermediate_size=c.size("intermediate_size"),
        max_positions=c.size("max_position_embeddings", 2048),
        norm="layernorm",
        norm_eps=c.number("layer_norm_eps", 1e-5),
        activation=activation,
        gated_mlp=False,
        biases=True,
        rope_theta=theta,
        rope_scaling=scaling,
        rotary_size=rotary_size(c, head_size, "rotary_pct", 0.25),
        parallel_residual=c.flag("use_parallel_residual", True),
        tied_embeddings=c.flag("tie_word_embeddings", False),
        initializer_range=c.number("initializer_range", 0.02),
    )


def starcoder2(c: Config) -> Architecture:
    """StarCoder2: rotary positions, shared keys and values, and an MLP without a gate."""
    hidden, heads = c.size("hidden_size", 3072), c.size("num_attention_heads", 24)
    activation = _gelu(c, "hidden_act", TANH_GELU[1])
    if not c.flag("use_bias", True):
        raise refusal(c.where, "use_bias", False, "true: anything else is not supported")
    theta, scaling = rope(c, "full_attention", 10_000.0)
    head_size = None if not c.missing("head_dim") else c.quotient("hidden_size", hidden, heads)
    decoder = Architecture(
        family="starcoder2",
        vocab_size=c.size("vocab_size", 49_152),
        hidden_size=hidden,
        layers=c.size("num_hidden_layers", 30),
        heads=heads,
        kv_heads=c.size("num_key_value_heads", 2),
        head_size=c.size("head_dim", head_size),
        intermediate_size=c.size("intermediate_size", 12_288),
        max_positions=c.size("max_position_embeddings", 4096),
        norm="layernorm",
        norm_eps=c.number("norm_epsilon", 1e-5),
        activation=activation,
        gated_mlp=False,
        biases=True,
        rope_theta=theta,
        rope_scaling=scaling,
        tied_embeddings=c.flag("tie_word_embeddings", True),
        initializer_range=c.number("initializer_range", 0.018042),
    )
    return decoder if c.missing("sliding_window") else all_local(decoder, c.size("sliding_window"))
