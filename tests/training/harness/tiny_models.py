"""Small random models of every family: the transformers model and this project's description of it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as t

from memconsole.plan.models.architecture import Architecture, RopeScaling
from memconsole_trainer.data.text.rows.batches import language_batch
from memconsole_trainer.engine import Batch

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "layers": 3,
    "heads": 4,
    "kv_heads": 2,
    "head_size": 16,
    "intermediate_size": 48,
    "max_positions": 128,
}
HUGGING_FACE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "attn_implementation": "eager",
}
NEOX = {k: v for k, v in HUGGING_FACE.items() if k not in ("num_key_value_heads", "head_dim")}
LLAMA3_ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

YARN_ROPE: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
LONG_ROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 500.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.25, 2.0],
    "long_factor": [1.0, 3.0, 8.0],
}

LLAMA3_SCALING = RopeScaling(
    factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_positions=32
)
YARN_SCALING = RopeScaling(
    kind="yarn", factor=4.0, original_positions=32, attention_factor=0.1 * math.log(4) + 1
)
OLMO: dict[str, Any] = {
    "norm_eps": 1e-5,
    "tied_embeddings": False,
    "query_key_norm": True,
    "joint_query_key_norm": True,
    "pre_norms": False,
    "post_norms": True,
}
"""What OLMo 2 and 3 have in common."""
ARCHITECTURES: dict[str, Architecture] = {
    "gpt2": Architecture(
        family="gpt2",
        **{**SIZES, "kv_heads": 4, "head_size": 8},
        norm="layernorm",
        norm_eps=1e-5,
        activation="gelu_tanh",
        gated_mlp=False,
        biases=True,
        positions="learned",
    ),
    "llama": Architecture(family="llama", **SIZES, norm_eps=1e-5),
    "llama-untied": Architecture(family="llama", **SIZES, norm_eps=1e-5, tied_embeddings=False),
    "llama-scaled": Architecture(
        family="llama",
        **SIZES,
        rope_theta=500.0,
        rope_scaling=LLAMA3_SCALING,
    ),
    "qwen3": Architecture(
        family="llama", **SIZES, tied_embeddings=False, query_key_norm=True, rope_theta=1e6
    ),
    "qwen2": Architecture(family="llama", **SIZES, projection_biases=True),
    "mistral": Architecture(family="llama", **SIZES, sliding_window=5, global_every=4),
    "mistral-yarn": Architecture(
        family="llama",
        **SIZES,
        rope_theta=500.0,
        rope_local_theta=500.0,
        rope_scaling=YARN_SCALING,
        scaled_local_layers=True,
        sliding_window=5,
        global_every=4,
    ),
    "ministral3": Architecture(
        family="ministral3",
        **SIZES,
        norm_eps=1e-5,
        rope_theta=500.0,
        rope_scaling=RopeScaling(kind="yarn", factor=16.0, original_positions=8, query_beta=0.1),
    ),
    "phi3": Architecture(
        family="phi3", **SIZES, tied_embeddings=False, sliding_window=7, global_every=4
    ),
    "phi4-mini": Architecture(
        family="phi3",
        **{**SIZES, "head_size": 8},
        rope_theta=500.0,
        rotary_size=6,
        rope_scaling=RopeScaling(
            kind="longrope",
            factor=4.0,
            original_positions=32,
            attention_factor=math.sqrt(1 + math.log(4) / math.log(32)),
            short_factors=tuple(LONG_ROPE["short_factor"]),
            long_factors=tuple(LONG_ROPE["long_factor"]),
        ),
    ),
    "qwen2-yarn": Architecture(
        family="llama",
        **SIZES,
        projection_biases=True,
        rope_theta=500.0,
        rope_scaling=YARN_SCALING,
    ),
    "smollm3": Architecture(family="llama", **SIZES, rope_theta=2e6, unrotated_every=2),
    "granite": Architecture(
        family="llama",
        **SIZES,
        attention_scale=0.125,
        embedding_multiplier=3.0,
        residual_multiplier=0.75,
        logits_scaling=1.5,
    ),
    "olmo2": Architecture(
        family="llama",
        **SIZES,
        **OLMO,
    ),
    "olmo3": Architecture(
        family="llama",
        **SIZES,
        **OLMO,
        rope_theta=500.0,
        rope_local_theta=500.0,
        rope_scaling=YARN_SCALING,
        sliding_window=5,
        global_every=3,
    ),
    "exaone4": Architecture(family="llama", **SIZES, **{**OLMO, "joint_query_key_norm": False}),
    "exaone4-windows": Architecture(
        family="llama",
        **SIZES,
        **{**OLMO, "joint_query_key_norm": False},
        rope_theta=500.0,
        rope_local_theta=500.0,
        rope_scaling=LLAMA3_SCALING,
        scaled_local_layers=True,
        sliding_window=5,
        global_every=2,
        unrotated_every=2,
    ),
    "ernie4_5": Architecture(family="ernie4_5", **SIZES, norm_eps=1e-5, rope_theta=5e5),
    "seed_oss": Architecture(
        family="seed_oss", **SIZES, tied_embeddings=False, projection_biases=True
    ),
    "glm": Architecture(
        family="glm",
        **SIZES,
        norm_eps=1e-5,
        tied_embeddings=False,
        projection_biases=True,
        rotary_size=8,
    ),
    "glm4": Architecture(
        family="glm",
        **SIZES,
        norm_eps=1e-5,
        tied_embeddings=False,
        post_norms=True,
        rotary_size=12,
        rope_theta=500.0,
        rope_scaling=YARN_SCALING,
    ),
    "mixtral": Architecture(
        family="mixtral",
        **SIZES,
        norm_eps=1e-5,
        experts=4,
        experts_per_token=2,
        normalized_shares=True,
        tied_embeddings=False,
        rope_theta=1e6,
    ),
    "qwen3_moe": Architecture(
        family="llama",
        **SIZES,
        query_key_norm=True,
        experts=8,
        experts_per_token=3,
        normalized_shares=True,
    ),
    "olmoe": Architecture(
        family="llama",
        **{**SIZES, "head_size": 8},
        norm_eps=1e-5,
        query_key_norm=True,
        joint_query_key_norm=True,
        experts=8,
        experts_per_token=2,
        tied_embeddings=False,
    ),
    "granite_moe": Architecture(
        family="granite_moe",
        **{**SIZES, "head_size": 8},
        attention_scale=0.125,
        embedding_multiplier=3.0,
        residual_multiplier=0.75,
        logits_scaling=1.5,
        experts=6,
        experts_per_token=2,
        normalized_shares=True,
    ),
    "gpt_neox": Architecture(
        family="gpt_neox",
        **{**SIZES, "kv_heads": 4, "head_size": 8},
        norm="layernorm",
        norm_eps=1e-5,
        activation="gelu",
        gated_mlp=False,
        biases=True,
        rotary_size=2,
        parallel_residual=True,
        tied_embeddings=False,
    ),
    "gpt_neox-serial": Architecture(
        family="gpt_neox",
        **{**SIZES, "kv_heads": 4, "head_size": 8},
        norm="layernorm",
        norm_eps=1e-5,
        activation="gelu_tanh",
        gated_mlp=False,
        biases=True,
        rope_theta=500.0,
        rope_scaling=RopeScaling(kind="linear", factor=4.0),
        rotary_size=4,
    ),
    "starcoder2": Architecture(
        family="starcoder2",
        **SIZES,
        norm="layernorm",
        norm_eps=1e-5,
        activation="gelu_tanh",
        gated_mlp=False,
        biases=True,
        sliding_window=5,
        global_every=4,
    ),
    "gemma": Architecture(
        family="gemma",
        **SIZES,
        norm_unit_offset=True,
        activation="gelu_tanh",
        scale_embeddings=True,
    ),
    "gemma2": Architecture(
        family="gemma2",
        **SIZES,
        norm_unit_offset=True,
        activation="gelu_tanh",
        scale_embeddings=True,
        post_norms=True,
        attention_scale=20**-0.5,
        attention_cap=2.0,
        logit_cap=5.0,
        sliding_window=5,
        global_every=2,
    ),
    "gemma3": Architecture(
        family="gemma3",
        **SIZES,
        norm_unit_offset=True,
        activation="gelu_tanh",
        scale_embeddings=True,
        query_key_norm=True,
        post_norms=True,
        attention_scale=20**-0.5,
        rope_theta=1e6,
        rope_local_theta=1e4,
        sliding_window=5,
        global_every=3,
    ),
}


def oracle(kind: str) -> Any:
    """The transformers model of `kind`, random in every tensor, norms and biases included."""
    h = HUGGING_FACE
    models: dict[str, Any] = {
        "gpt2": lambda: t.GPT2LMHeadModel(
            t.GPT2Config(
                vocab_size=96,
                n_embd=32,
                n_layer=3,
                n_head=4,
                n_inner=48,
                n_positions=128,
                attn_implementation="eager",
            )
        ),
        "llama": lambda: t.LlamaForCausalLM(
            t.LlamaConfig(**h, rms_norm_eps=1e-5, tie_word_embeddings=True)
        ),
        "llama-untied": lambda: t.LlamaForCausalLM(
            t.LlamaConfig(**h, rms_norm_eps=1e-5, tie_word_embeddings=False)
        ),
        "llama-scaled": lambda: t.LlamaForCausalLM(
            t.LlamaConfig(**h, tie_word_embeddings=True, rope_parameters=LLAMA3_ROPE)
        ),
        "qwen3": lambda: t.Qwen3ForCausalLM(
            t.Qwen3Config(
                **h,
                tie_word_embeddings=False,
                rope_parameters={"rope_type": "default", "rope_theta": 1e6},
            )
        ),
        "qwen2": lambda: t.Qwen2ForCausalLM(t.Qwen2Config(**h, tie_word_embeddings=True)),
        "mistral": lambda: t.MistralForCausalLM(
            t.MistralConfig(**h, sliding_window=5, tie_word_embeddings=True)
        ),
        "mistral-yarn": lambda: t.MistralForCausalLM(
            t.MistralConfig(
                **h, sliding_window=5, tie_word_embeddings=True, rope_parameters=dict(YARN_ROPE)
            )
        ),
        "ministral3": lambda: t.Ministral3ForCausalLM(
            t.Ministral3Config(
                **h,
                tie_word_embeddings=True,
                rope_parameters={
                    "rope_type": "yarn",
                    "rope_theta": 500.0,
                    "factor": 16.0,
                    "original_max_position_embeddings": 8,
                    "mscale": 1.0,
                    "mscale_all_dim": 1.0,
                    "llama_4_scaling_beta": 0.1,
                },
            )
        ),
        "phi3": lambda: t.Phi3ForCausalLM(
            t.Phi3Config(**h, sliding_window=7, bos_token_id=1, eos_token_id=2, rms_norm_eps=1e-6)
        ),
        "phi4-mini": lambda: t.Phi3ForCausalLM(
            t.Phi3Config(
                **{**h, "head_dim": 8},
                tie_word_embeddings=True,
                original_max_position_embeddings=32,
                rope_parameters=dict(LONG_ROPE),
                bos_token_id=1,
                eos_token_id=2,
                rms_norm_eps=1e-6,
            )
        ),
        "qwen2-yarn": lambda: t.Qwen2ForCausalLM(
            t.Qwen2Config(**h, tie_word_embeddings=True, rope_parameters=dict(YARN_ROPE))
        ),
        "smollm3": lambda: t.SmolLM3ForCausalLM(
            t.SmolLM3Config(**h, no_rope_layer_interval=2, bos_token_id=None, eos_token_id=None)
        ),
        "granite": lambda: t.GraniteForCausalLM(
            t.GraniteConfig(
                **h,
                tie_word_embeddings=True,
                attention_multiplier=0.125,
                embedding_multiplier=3.0,
                residual_multiplier=0.75,
                logits_scaling=1.5,
            )
        ),
        "olmo2": lambda: t.Olmo2ForCausalLM(t.Olmo2Config(**h)),
        "olmo3": lambda: t.Olmo3ForCausalLM(
            t.Olmo3Config(
                **h,
                sliding_window=5,
                layer_types=["sliding_attention", "sliding_attention", "full_attention"],
                rope_parameters={
                    "full_attention": dict(YARN_ROPE),
                    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
                },
            )
        ),
        "exaone4": lambda: t.Exaone4ForCausalLM(
            t.Exaone4Config(**h, sliding_window=None, layer_types=["full_attention"] * 3)
        ),
        "exaone4-windows": lambda: t.Exaone4ForCausalLM(
            t.Exaone4Config(
                **h,
                sliding_window=5,
                sliding_window_pattern="LG",
                layer_types=["sliding_attention", "full_attention", "sliding_attention"],
                rope_parameters=LLAMA3_ROPE,
            )
        ),
        "ernie4_5": lambda: t.Ernie4_5ForCausalLM(t.Ernie4_5Config(**h, tie_word_embeddings=True)),
        "seed_oss": lambda: t.SeedOssForCausalLM(t.SeedOssConfig(**h)),
        "glm": lambda: t.GlmForCausalLM(t.GlmConfig(**h, rms_norm_eps=1e-5, eos_token_id=1)),
        "glm4": lambda: t.Glm4ForCausalLM(
            t.Glm4Config(
                **h,
                rms_norm_eps=1e-5,
                eos_token_id=1,
                attention_bias=False,
                rope_parameters={**YARN_ROPE, "partial_rotary_factor": 0.75},
            )
        ),
        "mixtral": lambda: t.MixtralForCausalLM(
            t.MixtralConfig(**h, num_local_experts=4, num_experts_per_tok=2)
        ),
        "qwen3_moe": lambda: t.Qwen3MoeForCausalLM(
            t.Qwen3MoeConfig(
                **h,
                tie_word_embeddings=True,
                moe_intermediate_size=48,
                num_experts=8,
                num_experts_per_tok=3,
                norm_topk_prob=True,
            )
        ),
        "olmoe": lambda: t.OlmoeForCausalLM(
            t.OlmoeConfig(
                **{**h, "head_dim": 8}, num_experts=8, num_experts_per_tok=2, eos_token_id=1
            )
        ),
        "granite_moe": lambda: t.GraniteMoeForCausalLM(
            t.GraniteMoeConfig(
                **{**h, "head_dim": 8},
                tie_word_embeddings=True,
                attention_multiplier=0.125,
                embedding_multiplier=3.0,
                residual_multiplier=0.75,
                logits_scaling=1.5,
                num_local_experts=6,
                num_experts_per_tok=2,
            )
        ),
        "gpt_neox": lambda: t.GPTNeoXForCausalLM(t.GPTNeoXConfig(**NEOX)),
        "gpt_neox-serial": lambda: t.GPTNeoXForCausalLM(
            t.GPTNeoXConfig(
                **NEOX,
                hidden_act="gelu_fast",
                use_parallel_residual=False,
                tie_word_embeddings=True,
                rope_parameters={
                    "rope_type": "linear",
                    "rope_theta": 500.0,
                    "factor": 4.0,
                    "partial_rotary_factor": 0.5,
                },
            )
        ),
        "starcoder2": lambda: t.Starcoder2ForCausalLM(
            t.Starcoder2Config(**h, sliding_window=5, eos_token_id=1, bos_token_id=1)
        ),
        "gemma": lambda: t.GemmaForCausalLM(t.GemmaConfig(**h)),
        "gemma2": lambda: t.Gemma2ForCausalLM(
            t.Gemma2Config(
                **h,
                query_pre_attn_scalar=20,
                attn_logit_softcapping=2.0,
                final_logit_softcapping=5.0,
                sliding_window=5,
            )
        ),
        "gemma3": lambda: t.Gemma3ForCausalLM(
            t.Gemma3TextConfig(
                **h,
                query_pre_attn_scalar=20,
                sliding_window=5,
                layer_types=["sliding_attention", "sliding_attention", "full_attention"],
                rope_parameters={
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                    "full_attention": {"rope_type": "default", "rope_theta": 1e6},
                },
            )
        ),
    }
    model = models[kind]().eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise, alpha=0.2 if parameter.dim() > 1 else 0.3)
    return model


def save(kind: str, directory: Path, shard: str = "1GB") -> Any:
    """Save the oracle of `kind` as Hugging Face does and return it."""
    model = oracle(kind)
    model.save_pretrained(directory, max_shard_size=shard)
    return model


def tokens(rows: int = 2, length: int = 40, seed: int = 0) -> Any:
    """Random token ids, int32 (rows, length)."""
    return np.random.default_rng(seed).integers(0, 96, (rows, length), dtype=np.int32)


def batch(micro_batches: int, rows: int, length: int, seed: int = 0, masked: float = 0.0) -> Batch:
    """A random batch in which a share `masked` of the targets counts for nothing."""
    random = np.random.default_rng(seed)
    shape = (micro_batches, rows, length)
    inputs = random.integers(0, 96, shape, dtype=np.int32)
    targets = random.integers(0, 96, shape, dtype=np.int32)
    targets[random.random(shape) < masked] = -100
    return language_batch(inputs, targets)
