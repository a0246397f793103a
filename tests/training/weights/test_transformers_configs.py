"""The shapes read from a config.json are those of the model that transformers builds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memconsole.memory.state.sizes import sizes
from memconsole.plan import catalog
from memconsole.plan.models.configs.families import architecture_from_config

DATA = Path(__file__).parents[2] / "data"
PUBLISHED: dict[str, dict[str, Any]] = json.loads((DATA / "published_configs.json").read_text())
"""The published files, without the keys that describe tokens and versions."""


def transformers_config(config: dict[str, Any]) -> Any:
    transformers = pytest.importorskip("transformers")
    rest = {key: value for key, value in config.items() if key != "model_type"}
    made = transformers.AutoConfig.for_model(config["model_type"], **rest)
    return made.get_text_config()  # of a model that also sees images, the language model


def transformers_count(config: Any) -> int:
    """Parameters of transformers' own modules, built without memory; tied weights once."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    return sum({id(p): p.numel() for p in model.parameters()}.values())


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
    st.sampled_from(
        [
            "llama",
            "mistral",
            "qwen3",
            "granite",
            "olmo2",
            "olmo3",
            "gemma",
            "gemma2",
            "gemma3_text",
            "exaone4",
            "ernie4_5",
            "seed_oss",
            "glm",
            "glm4",
            "starcoder2",
        ]
    ),
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
        "sliding_window": 8 if model_type in ("olmo3", "gemma2", "gemma3_text") else None,
    }
    if head_dim is not None:
        config["head_dim"] = head_dim
    made = transformers_config(config)
    read = architecture_from_config(config, "config.json")
    assert sizes(read).total == transformers_count(made)
    written = json.loads(made.to_json_string(use_diff=False))
    again = architecture_from_config(written, "config.json")
    if model_type in ("gemma3_text", "olmo3"):
        local = [kind == "sliding_attention" for kind in made.layer_types]
        assert [read.is_local(i) for i in range(layers)] == local
        assert [again.is_local(i) for i in range(layers)] == local
        assert again.rope_theta == read.rope_theta
    else:
        assert again == read
    if model_type == "gemma2":
        local = [kind == "sliding_attention" for kind in made.layer_types]
        assert [read.is_local(i) for i in range(layers)] == local


@given(st.sampled_from([1, 2, 6]), st.sampled_from([0.25, 0.5, 1.0]), st.booleans(), st.booleans())
def test_shapes_of_gpt_neox_agree_with_transformers(
    heads: int, share: float, parallel: bool, tied: bool
) -> None:
    config: dict[str, Any] = {
        **TINY,
        "model_type": "gpt_neox",
        "num_attention_heads": heads,
        "intermediate_size": 40,
        "rotary_pct": share,
        "rotary_emb_base": 500,
        "use_parallel_residual": parallel,
        "tie_word_embeddings": tied,
    }
    made = transformers_config(config)
    read = architecture_from_config(config, "config.json")
    assert sizes(read).total == transformers_count(made)
    assert (
        architecture_from_config(json.loads(made.to_json_string(use_diff=False)), "again") == read
    )
