"""Writes weights as a Hugging Face directory: config.json and safetensors."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memconsole.plan.models.architecture import Architecture
from memconsole.plan.models.rotary import longrope_attention_factor
from memconsole_trainer.engine import WeightSource
from memconsole_trainer.weights.huggingface import exported

SHARD_BYTES = 4 << 30
DTYPES = ("float32", "bfloat16", "float16")
"""The types that weights are exported in."""
_OWN_TOKENS = ("phi3", "smollm3", "olmo2", "olmo3", "olmoe", "mixtral")
"""Kinds whose default special tokens are those of their own vocabularies."""
CLASSES = {
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "granite": "GraniteForCausalLM",
    "granitemoe": "GraniteMoeForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "gpt_neox": "GPTNeoXForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}
"""The transformers class of each model type."""


Change = Callable[[str, NDArray[np.generic]], Iterable[tuple[str, NDArray[np.generic]]]]


def as_it_is(name: str, array: NDArray[np.generic]) -> Iterable[tuple[str, NDArray[np.generic]]]:
    return ((name, array),)


def export(
    architecture: Architecture,
    weights: WeightSource,
    out: Path,
    dtype: str = "float32",
    change: Change = as_it_is,
    more: Mapping[str, Any] | None = None,
) -> bool:
    """Write config.json and safetensors into the folder `out`, which is made if it is missing.

    Weights are written shard by shard, so no more than
    `SHARD_BYTES` and one tensor are in memory. Tensors are rounded to `dtype`, then `change` maps
    each to the tensors it is stored as; `more` is added to config.json. Returns whether rounding
    changed a weight. Raises OSError.
    """
    out.mkdir(parents=True, exist_ok=True)
    description = {**config(architecture), "dtype": dtype, **(more or {})}
    (out / "config.json").write_text(json.dumps(description, indent=2) + "\n")
    shards: list[dict[str, Any]] = [{}]
    index: dict[str, int] = {}
    held = total = 0
    rounding = Rounding(dtype)
    named = ((n, rounding(array)) for n, array in exported(architecture, weights))
    tensors = (t for one in named for t in change(*one))
    for name, array in tensors:
        if held and held + array.nbytes > SHARD_BYTES:
            save(shards[-1], out / f"part-{len(shards)}")
            shards[-1] = {}
            shards.append({})
            held = 0
        shards[-1][name] = array
        index[name] = len(shards)
        held += array.nbytes
        total += array.nbytes
    save(shards[-1], out / f"part-{len(shards)}")
    if len(shards) == 1:
        os.replace(out / "part-1", out / "model.safetensors")
    else:
        names = {
            i: f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)
        }
        for i, name in names.items():
            os.replace(out / f"part-{i}", out / name)
        document = {
            "metadata": {"total_size": total},
            "weight_map": {name: names[shard] for name, shard in index.items()},
        }
        (out / "model.safetensors.index.json").write_text(json.dumps(document, indent=2) + "\n")
    return rounding.changed


class Rounding:
    """Converts arrays to one of `DTYPES`, and notes whether that changed a value."""

    def __init__(self, dtype: str) -> None:
        self._dtype = dtype
        self.changed = False

    def __call__(self, array: NDArray[np.generic]) -> NDArray[np.generic]:
        found = narrowed(array, self._dtype)
        if found is not array and not self.changed:
            wide = np.asarray(array, np.float32), np.asarray(found, np.float32)
            self.changed = not np.array_equal(*wide)
        return found


def save(tensors: Mapping[str, NDArray[np.generic]], path: Path) -> None:
    """Write a safetensors file that others may read as any new file. Raises OSError."""
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    path.touch()
    mode = path.stat().st_mode
    try:
        save_file(dict(tensors), path, metadata={"format": "pt"})
    except SafetensorError as error:
        found = re.search(r"\(os error (\d+)\)", str(error))
        if found is None:
            raise
        number = int(found[1])
        raise OSError(number, os.strerror(number), str(path)) from None
    path.chmod(mode)  # save_file gives the file to this user alone


def narrowed(array: NDArray[np.generic], dtype: str) -> NDArray[np.generic]:
    """The array in one of `DTYPES`. Values beyond the range of float16 are clipped and do not become infinite."""
    if array.dtype.name == dtype:
        return array
    if dtype == "bfloat16":
        import ml_dtypes  # type: ignore[import-not-found,unused-ignore]

        return array.astype(ml_dtypes.bfloat16)
    wide = np.asarray(array, np.float32)
    if dtype == "float16":
        most = np.finfo(np.float16).max
        wide = np.clip(wide, -most, most)
    return wide.astype(dtype)


def config(a: Architecture) -> dict[str, Any]:
    """The Hugging Face config.json of an architecture, in transformers 4 and 5 spelling."""
    if a.family == "gpt2":
        return _described(
            "gpt2",
            a,
            n_positions=a.max_positions,
            n_embd=a.hidden_size,
            n_layer=a.layers,
            n_head=a.heads,
            n_inner=a.intermediate_size,
            activation_function="gelu" if a.activation == "gelu" else "gelu_new",
            layer_norm_epsilon=a.norm_eps,
            attn_pdrop=0.0,
            embd_pdrop=0.0,
            resid_pdrop=0.0,
        )
    shape: dict[str, Any] = {
        "hidden_size": a.hidden_size,
        "num_hidden_layers": a.layers,
        "num_attention_heads": a.heads,
        "num_key_value_heads": a.kv_heads,
        "head_dim": a.head_size,
        "intermediate_size": a.intermediate_size,
        "max_position_embeddings": a.max_positions,
        "rms_norm_eps": a.norm_eps,
        "attention_bias": False,
        "attention_dropout": 0.0,
    }
    kinds = ["sliding_attention" if a.is_local(i) else "full_attention" for i in range(a.layers)]
    if a.family == "gemma3":
        return _described(
            "gemma3_text",
            a,
            **shape,
            hidden_activation="gelu_pytorch_tanh",
            query_pre_attn_scalar=round(a.scale**-2),
            sliding_window=a.sliding_window,
            sliding_window_pattern=a.global_every,
            layer_types=kinds,
            rope_theta=a.rope_theta,
            rope_local_base_freq=a.rope_local_theta,
            rope_parameters=_by_layer_type(a),
        )
    parameters = {**_rope(a), "rope_theta": a.rope_theta}
    if a.family in ("phi3", "gpt_neox"):
        parameters["partial_rotary_factor"] = a.rotated_size / a.head_size
    rope: dict[str, Any] = {"rope_theta": a.rope_theta, "rope_parameters": parameters}
    if a.rope_scaling is not None:
        rope["rope_scaling"] = _rope(a)
    if a.family == "gpt_neox":
        return _described("gpt_neox", a, **_gpt_neox(a), **rope)
    if a.family == "gemma":
        return _described("gemma", a, **shape, **rope, hidden_activation="gelu_pytorch_tanh")
    if a.family == "gemma2":
        return _described(
            "gemma2",
            a,
            **shape,
            **rope,
            hidden_activation="gelu_pytorch_tanh",
            query_pre_attn_scalar=round(a.scale**-2),
            attn_logit_softcapping=a.attention_cap,
            final_logit_softcapping=a.logit_cap,
            sliding_window=a.sliding_window,
            layer_types=kinds,
        )
    kind, more = "llama", dict[str, Any]()
    if a.attention_scale is not None:
        kind, more = _experts(a) if a.experts else ("granite", more)
        more |= {
            "attention_multiplier": a.attention_scale,
            "embedding_multiplier": a.embedding_multiplier,
            "residual_multiplier": a.residual_multiplier,
            "logits_scaling": a.logits_scaling,
        }
    elif a.experts:
        kind, more = _experts(a)
    elif not a.pre_norms and a.sliding_window is not None:
        kind = "olmo3"
        more = {"sliding_window": a.sliding_window, "layer_types": kinds}
        rope["rope_parameters"] = _by_layer_type(a)
    elif not a.pre_norms:
        kind = "olmo2"
    elif a.query_key_norm:
        kind = "qwen3"
    elif a.projection_biases:
        kind = "qwen2"
    elif a.unrotated_every:
        kind = "smollm3"
        more = {"no_rope_layers": [int(a.is_rotated(layer)) for layer in range(a.layers)]}
    elif a.family == "phi3" or a.sliding_window is not None:
        kind = "phi3" if a.family == "phi3" else "mistral"
        more = {"sliding_window": a.sliding_window}
    if kind == "phi3":
        more |= _phi3(a)
    if kind in _OWN_TOKENS:
        more |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    return _described(kind, a, **shape, **rope, **more, hidden_act="silu")


def _by_layer_type(a: Architecture) -> dict[str, Any]:
    """The rotary positions of each kind of layer, as transformers 5 writes them."""
    return {
        "full_attention": {**_rope(a), "rope_theta": a.rope_theta},
        "sliding_attention": {"rope_type": "default", "rope_theta": a.rope_local_theta},
    }


def _experts(a: Architecture) -> tuple[str, dict[str, Any]]:
    """The model type of a mixture of experts, and what it says of them."""
    more = {"num_experts_per_tok": a.experts_per_token, "router_aux_loss_coef": 0.0}
    if a.family in ("mixtral", "granite_moe"):
        more["num_local_experts"] = a.experts
        if a.family == "granite_moe":
            return "granitemoe", more
        return "mixtral", {**more, "sliding_window": a.sliding_window}
    more |= {"num_experts": a.experts, "norm_topk_prob": a.normalized_shares}
    if a.joint_query_key_norm:
        return "olmoe", {**more, "clip_qkv": None}
    inner = {"moe_intermediate_size": a.intermediate_size, "decoder_sparse_step": 1}
    return "qwen3_moe", {**more, **inner, "mlp_only_layers": [], "use_sliding_window": False}


def _gpt_neox(a: Architecture) -> dict[str, Any]:
    """What GPT-NeoX says of its shape, and its own names for its rotary positions."""
    return {
        "hidden_size": a.hidden_size,
        "num_hidden_layers": a.layers,
        "num_attention_heads": a.heads,
        "intermediate_size": a.intermediate_size,
        "max_position_embeddings": a.max_positions,
        "hidden_act": "gelu" if a.activation == "gelu" else "gelu_new",
        "layer_norm_eps": a.norm_eps,
        "use_parallel_residual": a.parallel_residual,
        "attention_bias": True,
        "rotary_pct": a.rotated_size / a.head_size,
        "rotary_emb_base": a.rope_theta,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    }


def _phi3(a: Architecture) -> dict[str, Any]:
    """What Phi-3 says of its rotary positions beside their scaling."""
    scaling = a.rope_scaling
    original = a.max_positions if scaling is None else scaling.original_positions
    return {
        "partial_rotary_factor": a.rotated_size / a.head_size,
        "original_max_position_embeddings": original,
    }


def _described(kind: str, a: Architecture, **rest: Any) -> dict[str, Any]:
    return {
        "architectures": [CLASSES[kind]],
        "model_type": kind,
        "vocab_size": a.vocab_size,
        "tie_word_embeddings": a.tied_embeddings,
        "initializer_range": a.initializer_range,
        **rest,
    }


def _rope(a: Architecture) -> dict[str, Any]:
    s = a.rope_scaling
    if s is None:
        return {"rope_type": "default"}
    if s.kind == "linear":
        return {"rope_type": "linear", "factor": s.factor}
    original = {"original_max_position_embeddings": s.original_positions}
    if s.kind == "llama3":
        return {
            "rope_type": "llama3",
            "factor": s.factor,
            "low_freq_factor": s.low_freq_factor,
            "high_freq_factor": s.high_freq_factor,
            **original,
        }
    if s.kind == "yarn":
        return {
            "rope_type": "yarn",
            "factor": s.factor,
            "beta_fast": s.beta_fast,
            "beta_slow": s.beta_slow,
            "truncate": s.truncate,
            "attention_factor": s.attention_factor,
            **original,
        }
    factors = {"short_factor": list(s.short_factors), "long_factor": list(s.long_factors)}
    usual = longrope_attention_factor(a.max_positions / s.original_positions, s.original_positions)
    if a.family == "phi3" and s.attention_factor == usual:
        return {"type": "longrope", **factors}  # transformers 4 allows Phi-3 no more keys
    return {
        "rope_type": "longrope",
        "factor": s.factor,
        "attention_factor": s.attention_factor,
        **factors,
        **original,
    }
