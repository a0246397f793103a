"""config.json to Architecture: transformers is the oracle for shapes, refusals name the feature."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memconsole.plan import catalog
from memconsole.plan.architecture import parameter_count
from memconsole.plan.huggingface import architecture_from_config, find_model, read_architecture
from memconsole.plan.plan import ModelChoice, Plan, PlanError

# The published files, without the keys that describe tokens and versions.
PUBLISHED: dict[str, dict[str, Any]] = {
    "gpt2": {
        "activation_function": "gelu_new", "attn_pdrop": 0.1, "embd_pdrop": 0.1, "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-05, "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12,
        "n_layer": 12, "n_positions": 1024, "resid_pdrop": 0.1, "vocab_size": 50257,
    },
    "gpt2-medium": {
        "activation_function": "gelu_new", "layer_norm_epsilon": 1e-05, "model_type": "gpt2",
        "n_ctx": 1024, "n_embd": 1024, "n_head": 16, "n_layer": 24, "n_positions": 1024, "vocab_size": 50257,
    },
    "gpt2-large": {
        "activation_function": "gelu_new", "layer_norm_epsilon": 1e-05, "model_type": "gpt2",
        "n_ctx": 1024, "n_embd": 1280, "n_head": 20, "n_layer": 36, "n_positions": 1024, "vocab_size": 50257,
    },
    "gpt2-xl": {
        "activation_function": "gelu_new", "layer_norm_epsilon": 1e-05, "model_type": "gpt2",
        "n_ctx": 1024, "n_embd": 1600, "n_head": 25, "n_layer": 48, "n_positions": 1024, "vocab_size": 50257,
    },
    "llama-3.2-1b": {
        "attention_bias": False, "attention_dropout": 0.0, "head_dim": 64, "hidden_act": "silu",
        "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 8192,
        "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama",
        "num_attention_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8, "pretraining_tp": 1,
        "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "tie_word_embeddings": True, "vocab_size": 128256,
        "rope_scaling": {
            "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192, "rope_type": "llama3",
        },
    },
    "llama-3.2-3b": {
        "attention_bias": False, "head_dim": 128, "hidden_act": "silu", "hidden_size": 3072,
        "intermediate_size": 8192, "max_position_embeddings": 131072, "mlp_bias": False,
        "model_type": "llama", "num_attention_heads": 24, "num_hidden_layers": 28, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "tie_word_embeddings": True, "vocab_size": 128256,
        "rope_scaling": {
            "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192, "rope_type": "llama3",
        },
    },
    "llama-3.1-8b": {
        "attention_bias": False, "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
        "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama",
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
        "rope_theta": 500000.0, "tie_word_embeddings": False, "vocab_size": 128256,
        "rope_scaling": {
            "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192, "rope_type": "llama3",
        },
    },
    "gemma-2b": {
        "attention_bias": False, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": None, "hidden_size": 2048, "intermediate_size": 16384,
        "max_position_embeddings": 8192, "model_type": "gemma", "num_attention_heads": 8,
        "num_hidden_layers": 18, "num_key_value_heads": 1, "rms_norm_eps": 1e-06, "rope_scaling": None,
        "rope_theta": 10000.0, "vocab_size": 256000,
    },
    "gemma-3-1b": {
        "attention_bias": False, "attn_logit_softcapping": None, "final_logit_softcapping": None,
        "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152,
        "intermediate_size": 6912, "max_position_embeddings": 32768, "model_type": "gemma3_text",
        "num_attention_heads": 4, "num_hidden_layers": 26, "num_key_value_heads": 1,
        "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000,
        "rope_scaling": None, "rope_theta": 1000000, "sliding_window": 512, "sliding_window_pattern": 6,
        "vocab_size": 262144,
    },
    "qwen3-0.6b": {
        "attention_bias": False, "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024,
        "intermediate_size": 3072, "max_position_embeddings": 40960, "max_window_layers": 28,
        "model_type": "qwen3", "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None,
        "tie_word_embeddings": True, "use_sliding_window": False, "vocab_size": 151936,
    },
    "qwen3-1.7b": {
        "attention_bias": False, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048,
        "intermediate_size": 6144, "max_position_embeddings": 40960, "max_window_layers": 28,
        "model_type": "qwen3", "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None,
        "tie_word_embeddings": True, "use_sliding_window": False, "vocab_size": 151936,
    },
    "smollm2-135m": {
        "attention_bias": False, "hidden_act": "silu", "hidden_size": 576,
        "initializer_range": 0.041666666666666664, "intermediate_size": 1536, "is_llama_config": True,
        "max_position_embeddings": 8192, "mlp_bias": False, "model_type": "llama", "num_attention_heads": 9,
        "num_hidden_layers": 30, "num_key_value_heads": 3, "rms_norm_eps": 1e-05, "rope_interleaved": False,
        "rope_scaling": None, "rope_theta": 100000, "tie_word_embeddings": True, "vocab_size": 49152,
    },
    "smollm2-360m": {
        "attention_bias": False, "hidden_act": "silu", "hidden_size": 960, "initializer_range": 0.02,
        "intermediate_size": 2560, "is_llama_config": True, "max_position_embeddings": 8192,
        "mlp_bias": False, "model_type": "llama", "num_attention_heads": 15, "num_hidden_layers": 32,
        "num_key_value_heads": 5, "rms_norm_eps": 1e-05, "rope_interleaved": False, "rope_scaling": None,
        "rope_theta": 100000, "tie_word_embeddings": True, "vocab_size": 49152,
    },
}  # fmt: skip


def transformers_config(config: dict[str, Any]) -> Any:
    transformers = pytest.importorskip("transformers")
    rest = {key: value for key, value in config.items() if key != "model_type"}
    return transformers.AutoConfig.for_model(config["model_type"], **rest)


def transformers_count(config: Any) -> int:
    """Parameters of transformers' own modules, built without memory; tied weights once."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    return sum({id(p): p.numel() for p in model.parameters()}.values())


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_file_reads_as_its_catalog_model(name: str) -> None:
    entry = catalog.models()[name]
    assert architecture_from_config(PUBLISHED[name], "config.json") == entry.architecture


def test_every_published_catalog_model_has_its_file_here() -> None:
    assert {m.name for m in catalog.models().values() if m.hub_id} == set(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_transformers_builds_as_many_parameters(name: str) -> None:
    config = transformers_config(PUBLISHED[name])
    assert transformers_count(config) == catalog.models()[name].parameters


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_spelling_transformers_writes_today_reads_the_same(name: str) -> None:
    written = json.loads(transformers_config(PUBLISHED[name]).to_json_string(use_diff=False))
    assert architecture_from_config(written, "config.json") == catalog.models()[name].architecture


TINY = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 300}


@given(
    st.sampled_from(["llama", "mistral", "qwen3", "gemma", "gemma3_text"]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([None, 12, 32]),
    st.booleans(),
    st.integers(1, 7),
)
def test_shapes_agree_with_transformers_for_random_configs(
    model_type: str, kv_heads: int, head_dim: int | None, tied: bool, layers: int
) -> None:
    config: dict[str, Any] = {
        **TINY,
        "model_type": model_type,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "intermediate_size": 40,
        "tie_word_embeddings": tied,
        "pad_token_id": 0,
        "sliding_window": 8 if model_type == "gemma3_text" else None,
    }
    if head_dim is not None:
        config["head_dim"] = head_dim
    made = transformers_config(config)
    read = architecture_from_config(config, "config.json")
    assert parameter_count(read) == transformers_count(made)
    written = json.loads(made.to_json_string(use_diff=False))
    again = architecture_from_config(written, "config.json")
    if model_type == "gemma3_text":
        local = [kind == "sliding_attention" for kind in made.layer_types]
        assert [read.is_local(i) for i in range(layers)] == local
        assert [again.is_local(i) for i in range(layers)] == local
        assert again.rope_theta == read.rope_theta
    else:
        assert again == read


LLAMA = PUBLISHED["llama-3.2-1b"]
GEMMA3 = PUBLISHED["gemma-3-1b"]


@pytest.mark.parametrize(
    ("base", "change", "named"),
    [
        (LLAMA, {"attention_bias": True}, "attention_bias = true"),
        (LLAMA, {"mlp_bias": True}, "mlp_bias"),
        (LLAMA, {"hidden_act": "relu"}, 'hidden_act = "relu"'),
        (LLAMA, {"model_type": "qwen2"}, 'model_type = "qwen2"'),
        (LLAMA, {"model_type": None}, "model_type = none"),
        (LLAMA, {"model_type": 7}, "model_type = 7"),
        (LLAMA, {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 'rope_type = "yarn"'),
        (LLAMA, {"rope_scaling": {"rope_type": "llama3"}}, "factor"),
        (LLAMA, {"rope_scaling": 3}, "rope_scaling"),
        (LLAMA, {"quantization_config": {"bits": 4}}, "quantization_config"),
        (LLAMA, {"num_key_value_heads": 5}, "num_key_value_heads = 5"),
        (LLAMA, {"hidden_size": 0}, "hidden_size = 0"),
        (LLAMA, {"hidden_size": "2048"}, 'hidden_size = "2048"'),
        (LLAMA, {"hidden_size": None}, "hidden_size = none"),
        (LLAMA, {"num_hidden_layers": 2**40}, "num_hidden_layers"),
        (LLAMA, {"head_dim": 63}, "head_dim"),
        (LLAMA, {"rms_norm_eps": -1}, "rms_norm_eps"),
        (LLAMA, {"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        (LLAMA, {"layer_types": ["sliding_attention"] * 16}, "layer_types"),
        (LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (LLAMA, {"model_type": "mistral", "sliding_window": 4096}, "sliding_window"),
        (PUBLISHED["qwen3-0.6b"], {"use_sliding_window": True}, "use_sliding_window"),
        (PUBLISHED["gemma-2b"], {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        (PUBLISHED["gemma-2b"], {"model_type": "gemma2"}, "gemma2"),
        (GEMMA3, {"layer_types": ["full_attention", *["sliding_attention"] * 25]}, "layer_types"),
        (GEMMA3, {"layer_types": ["full_attention"]}, "layer_types"),
        (GEMMA3, {"model_type": "gemma3"}, "gemma3"),
        (PUBLISHED["gpt2"], {"activation_function": "relu"}, "activation_function"),
        (PUBLISHED["gpt2"], {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse"),
        (PUBLISHED["gpt2"], {"n_head": 7}, "n_embd = 768"),
    ],
)  # fmt: skip
def test_an_unsupported_feature_is_refused_by_name(
    base: dict[str, Any], change: dict[str, Any], named: str
) -> None:
    with pytest.raises(PlanError) as error:
        architecture_from_config(base | change, "somewhere/config.json")
    message = str(error.value)
    assert named in message
    assert "somewhere/config.json" in message
    assert "\n" not in message


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(
    st.sampled_from(sorted(PUBLISHED)),
    st.dictionaries(
        st.sampled_from(
            sorted(
                {*LLAMA, *GEMMA3, *PUBLISHED["gpt2"], "layer_types", "rope_parameters", "n_inner"}
            )
        ),
        json_values,
        min_size=1,
        max_size=3,
    ),
)
def test_a_damaged_file_raises_nothing_but_one_line_plan_errors(
    name: str, change: dict[str, Any]
) -> None:
    message = ""
    try:
        made = architecture_from_config(PUBLISHED[name] | change, "c\n.json")
    except PlanError as error:
        message = str(error)
    else:
        assert parameter_count(made) > 0
    assert "\n" not in message


def test_a_directory_is_read_and_read_again_when_it_changes(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    plan = Plan(model=ModelChoice(name=str(tmp_path)))
    assert catalog.architecture(plan).layers == 16
    assert catalog.model_directory(plan) == str(tmp_path)
    path.write_text(json.dumps(LLAMA | {"num_hidden_layers": 3}))
    os.utime(path, ns=(1, 1))
    assert catalog.architecture(plan).layers == 3


def test_a_directory_without_a_usable_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"no config\.json"):
        find_model(str(tmp_path))
    for content in ("{", "[1]", '"x"', "[" * 100_000):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(PlanError, match="cannot be read") as error:
            read_architecture(str(tmp_path))
        assert "\n" not in str(error.value)


def test_a_hub_id_is_found_in_the_local_cache_and_never_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    plan = Plan(model=ModelChoice(name="someone/tiny"))
    with pytest.raises(PlanError, match="hf download someone/tiny"):
        catalog.architecture(plan)
    folder = tmp_path / "models--someone--tiny"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("abc")
    (folder / "snapshots" / "abc").mkdir(parents=True)
    (folder / "snapshots" / "abc" / "config.json").write_text(json.dumps(LLAMA))
    assert catalog.architecture(plan).layers == 16
    assert catalog.model_directory(plan) == str(folder / "snapshots" / "abc")


@pytest.mark.parametrize("name", ["", "a\0b", "~nobody-here/x", "../nothing/here", "x" * 5000])
def test_names_that_cannot_be_paths_are_plan_errors(name: str) -> None:
    with pytest.raises(PlanError) as error:
        catalog.architecture(Plan(model=ModelChoice(name=name)))
    assert "\n" not in str(error.value)
