"""config.json to Architecture; a refusal names the feature."""

from __future__ import annotations

import json
import math
import os
import shlex
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memconsole.memory.state.sizes import sizes
from memconsole.plan import catalog
from memconsole.plan.models import rotary
from memconsole.plan.models.architecture import Architecture
from memconsole.plan.models.configs.families import architecture_from_config, read_architecture
from memconsole.plan.models.finding import find_model
from memconsole.plan.plan import ModelChoice, Plan, PlanError

DATA = Path(__file__).parents[2] / "data"
PUBLISHED: dict[str, dict[str, Any]] = json.loads((DATA / "published_configs.json").read_text())
"""The published files, without the keys that describe tokens and versions."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_file_reads_as_its_catalog_model(name: str) -> None:
    entry = catalog.models()[name]
    assert architecture_from_config(PUBLISHED[name], "config.json") == entry.architecture


@pytest.mark.parametrize("kind", ["su", "yarn", "longrope"])
def test_phi_names_longrope_in_three_ways(kind: str) -> None:
    scaling = {**PHI4["rope_scaling"], "type": kind}
    read = architecture_from_config({**PHI4, "rope_scaling": scaling}, "config.json")
    assert read.rope_scaling is not None
    assert read.rope_scaling.kind == "longrope"
    assert read.rope_scaling.attention_factor == pytest.approx(1.1902380714)  # published for 32 x
    assert read.rotated_size == 48
    short, long = read.angles(4096, local=False), read.angles(4097, local=False)
    assert short == pytest.approx([3 * angle for angle in long])


def test_a_model_with_images_is_tied_as_its_outer_table_says() -> None:
    text = {**PUBLISHED["gemma-3-4b"]["text_config"], "tie_word_embeddings": True}
    config = {**PUBLISHED["gemma-3-4b"], "text_config": text}
    assert architecture_from_config(config, "config.json").tied_embeddings
    untied = {**config, "tie_word_embeddings": False}
    assert not architecture_from_config(untied, "config.json").tied_embeddings


def test_a_qwen2_5_vl_of_one_table_is_a_qwen2_5() -> None:
    mrope = {"type": "mrope", "mrope_section": [16, 24, 24]}
    older = {**QWEN2, "model_type": "qwen2_5_vl", "rope_scaling": mrope, "vision_config": {}}
    read = architecture_from_config(older, "config.json")
    assert read == architecture_from_config(QWEN2, "config.json")


@pytest.mark.parametrize(("outer", "inner"), [(True, False), (False, True)])
def test_a_qwen2_5_vl_is_tied_if_one_of_its_tables_says_so(outer: bool, inner: bool) -> None:
    text = {**QWEN2, "model_type": "qwen2_5_vl_text", "tie_word_embeddings": inner}
    config = {"model_type": "qwen2_5_vl", "tie_word_embeddings": outer, "text_config": text}
    assert architecture_from_config(config, "config.json").tied_embeddings


def test_a_head_size_of_null_is_a_share_of_the_stream() -> None:
    read = architecture_from_config({**ERNIE, "head_dim": None}, "config.json")
    assert read.head_size == 1024 // 16


def test_the_longest_rows_of_pretraining_may_be_named_beside_the_scaling() -> None:
    config = {**LLAMA, "original_max_position_embeddings": 4096}
    scaling = architecture_from_config(config, "config.json").rope_scaling
    assert scaling is not None
    assert scaling.original_positions == 4096


def test_a_gpt_neox_may_be_serial_and_rotate_whole_heads() -> None:
    config = {**PYTHIA, "use_parallel_residual": False, "rotary_pct": 1.0, "rotary_emb_base": 500}
    read = architecture_from_config(config, "config.json")
    assert (read.parallel_residual, read.rotary_size, read.rope_theta) == (False, None, 500.0)


def test_no_rope_layers_may_be_empty_or_name_every_layer() -> None:
    every = {**SMOLLM3, "no_rope_layers": [1] * 36}
    assert architecture_from_config(every, "config.json").unrotated_every == 0
    none = {**SMOLLM3, "no_rope_layers": [0] * 40}
    assert architecture_from_config(none, "config.json").unrotated_every == 1
    read = architecture_from_config({**SMOLLM3, "no_rope_layers": None}, "config.json")
    assert [read.is_rotated(layer) for layer in range(5)] == [True, True, True, False, True]


def test_the_positions_of_olmo_3_are_scaled_in_every_fourth_layer() -> None:
    read = architecture_from_config(OLMO3, "config.json")
    assert [read.is_local(layer) for layer in range(8)] == [True, True, True, False] * 2
    assert (read.sliding_window, read.rope_theta, read.rope_local_theta) == (4096, 5e5, 5e5)
    assert read.rope_scaling is not None
    assert read.rope_scaling.kind == "yarn"
    plain = rotary.angles(read.head_size, 5e5)
    assert read.angles(4096, local=True) == plain
    assert read.angles(4096, local=False) != plain


def test_exaone_4_rotates_in_its_local_layers_alone_and_scales_their_positions() -> None:
    windows = {"sliding_window": 4096, "sliding_window_pattern": "LLLG"}
    kinds = (["sliding_attention"] * 3 + ["full_attention"]) * 2
    config = {**EXAONE, **windows, "num_hidden_layers": 8, "layer_types": kinds}
    read = architecture_from_config(config, "config.json")
    assert [read.is_local(layer) for layer in range(8)] == [True, True, True, False] * 2
    assert [read.is_rotated(layer) for layer in range(8)] == [True, True, True, False] * 2
    assert read.angles(4096, local=True) == read.angles(4096, local=False)
    assert read.angles(4096, local=True) != rotary.angles(read.head_size, read.rope_theta)


def test_queries_of_ministral_3_grow_after_the_rows_of_pretraining() -> None:
    read = architecture_from_config(MINISTRAL3, "config.json")
    assert read.rope_scaling is not None
    assert (read.rope_scaling.query_beta, read.rope_scaling.attention_factor) == (0.1, 1.0)
    assert not read.scales_queries(16_384, local=False)
    assert read.scales_queries(16_385, local=False)
    devstral = {"llama_4_scaling_beta": 0.0, "mscale_all_dim": 0.0}
    text = MINISTRAL3["text_config"]
    changed = {**text, "rope_parameters": {**text["rope_parameters"], **devstral}}
    plain = architecture_from_config({**MINISTRAL3, "text_config": changed}, "config.json")
    assert plain.rope_scaling is not None
    assert plain.rope_scaling.attention_factor == pytest.approx(0.1 * math.log(16) + 1)
    assert not plain.scales_queries(200_000, local=False)


@pytest.mark.parametrize("name", ["starcoder2-3b", "gemma-2-2b"])
def test_a_scaling_of_a_model_with_windows_counts_in_all_its_layers(name: str) -> None:
    scaled = {**PUBLISHED[name], "rope_scaling": {"type": "linear", "factor": 2.0}}
    read = architecture_from_config(scaled, "config.json")
    half = tuple(angle / 2 for angle in rotary.angles(read.head_size, read.rope_theta))
    for local in (True, False):
        assert read.angles(4096, local=local) == pytest.approx(half)


def test_every_published_catalog_model_has_its_file_here() -> None:
    assert {m.name for m in catalog.models().values() if m.hub_id} == set(PUBLISHED)


LLAMA = PUBLISHED["llama-3.2-1b"]
GEMMA3 = PUBLISHED["gemma-3-1b"]
GEMMA2 = PUBLISHED["gemma-2-2b"]
SMOLLM3 = PUBLISHED["smollm3-3b"]
GRANITE = PUBLISHED["granite-3.1-2b"]
GRANITE_MOE = PUBLISHED["granite-3.1-1b-a400m"]
OLMO2 = PUBLISHED["olmo-2-1b"]
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192}
OLMO3 = {
    **OLMO2,
    "model_type": "olmo3",
    "max_position_embeddings": 65_536,
    "sliding_window": 4096,
    "rope_scaling": YARN,
}
QWEN2 = PUBLISHED["qwen2.5-7b"]
EXAONE = PUBLISHED["exaone-4.0-1.2b"]
ERNIE = PUBLISHED["ernie-4.5-0.3b"]
SEED_OSS = PUBLISHED["seed-oss-36b"]
GLM4 = PUBLISHED["glm-4-9b-0414"]
MINISTRAL3 = PUBLISHED["ministral-3-3b"]
STARCODER2 = PUBLISHED["starcoder2-3b"]
OLMOE = PUBLISHED["olmoe-1b-7b"]
QWEN3_MOE = PUBLISHED["qwen3-30b-a3b"]
MIXTRAL = PUBLISHED["mixtral-8x7b"]
PYTHIA = PUBLISHED["pythia-70m"]
LONG = {"type": "longrope", "short_factor": [1.0, 1.0], "long_factor": [1.5, 2.0]}
PHI4 = {
    **PUBLISHED["phi-4"],
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 131_072,
    "original_max_position_embeddings": 4096,
    "partial_rotary_factor": 0.75,
    "rope_scaling": {**LONG, "short_factor": [1.0] * 24, "long_factor": [3.0] * 24},
}
"""A small Phi-4-mini."""


@pytest.mark.parametrize(
    ("base", "change", "named"),
    [
        (LLAMA, {"attention_bias": True}, "attention_bias = true"),
        (LLAMA, {"mlp_bias": True}, "mlp_bias"),
        (LLAMA, {"hidden_act": "relu"}, 'hidden_act = "relu"'),
        (LLAMA, {"model_type": "qwen9"}, 'model_type = "qwen9"'),
        (LLAMA, {"model_type": None}, "model_type = none"),
        (LLAMA, {"model_type": 7}, "model_type = 7"),
        (LLAMA, {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, 'rope_type = "dynamic"'),
        (LLAMA, {"rope_scaling": {"rope_type": "yarn", "factor": -4.0}}, "factor = -4.0"),
        (LLAMA, {"rope_theta": 1, "rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_theta"),
        (LLAMA, {"rope_scaling": {"rope_type": "longrope"}}, "short_factor = none"),
        (LLAMA, {"rope_scaling": {**LONG, "short_factor": [1.0, "2"]}}, 'short_factor = "2"'),
        (LLAMA, {"rope_scaling": LONG}, "short_factor = \"2 numbers\": expected 32"),
        (LLAMA, {"rope_scaling": LONG, "original_max_position_embeddings": 1}, "more than 1"),
        (PHI4, {"partial_rotary_factor": 1.5}, "partial_rotary_factor = 1.5"),
        (PHI4, {"partial_rotary_factor": 0.001}, "partial_rotary_factor = 0.001"),
        (SMOLLM3, {"no_rope_layers": [1, 0, 0, 1] * 9}, "no_rope_layers"),
        (SMOLLM3, {"no_rope_layers": [1, 2]}, "expected a list of 0 and 1"),
        (SMOLLM3, {"no_rope_layers": 4}, "expected a list of 0 and 1"),
        (LLAMA, {"no_rope_layers": [1, 0]}, "no_rope_layers"),
        (GRANITE, {"attention_bias": True}, "attention_bias = true"),
        (GRANITE, {"hidden_act": "gelu"}, 'hidden_act = "gelu"'),
        (GRANITE, {"residual_multiplier": 0}, "residual_multiplier = 0"),
        (GRANITE, {"model_type": "granitemoeshared"}, 'model_type = "granitemoeshared"'),
        (GRANITE_MOE, {"num_experts_per_tok": 33}, "num_experts_per_tok = 33: expected at most the 32"),
        (OLMO2, {"attention_bias": True}, "attention_bias = true"),
        (OLMO2, {"hidden_act": "gelu"}, 'hidden_act = "gelu"'),
        (OLMO3, {"layer_types": ["full_attention"] * 16, "num_hidden_layers": 15}, "layer_types"),
        (OLMO3, {"rope_parameters": {"full_attention": YARN, "sliding_attention": YARN}}, "no scaling of local layers"),
        (OLMO2, {"model_type": "olmo_hybrid"}, 'model_type = "olmo_hybrid"'),
        (EXAONE, {"sliding_window": 4096}, "sliding_window = 4096: expected null"),
        (EXAONE, {"hidden_act": "gelu"}, 'hidden_act = "gelu"'),
        (ERNIE, {"use_bias": True}, "use_bias = true"),
        (ERNIE, {"model_type": "ernie4_5_moe"}, 'model_type = "ernie4_5_moe"'),
        (SEED_OSS, {"attention_out_bias": True}, "attention_out_bias = true"),
        (SEED_OSS, {"mlp_bias": True}, "mlp_bias = true"),
        (GLM4, {"partial_rotary_factor": 0.01}, "partial_rotary_factor = 0.01"),
        (GLM4, {"model_type": "glm4_moe"}, 'model_type = "glm4_moe"'),
        (STARCODER2, {"use_bias": False}, "use_bias = false"),
        (STARCODER2, {"hidden_act": "relu"}, 'hidden_act = "relu"'),
        (STARCODER2, {"num_attention_heads": 7}, "hidden_size = 3072"),
        (STARCODER2, {"sliding_window": 0}, "sliding_window = 0"),
        (MINISTRAL3, {"text_config": {**MINISTRAL3["text_config"], "rope_parameters": None}}, "rope_parameters = none"),
        (MINISTRAL3, {"text_config": {**MINISTRAL3["text_config"], "rope_parameters": {"rope_type": "default"}}}, "rope_type = \"default\""),
        (OLMOE, {"clip_qkv": 8.0}, "clip_qkv = 8.0"),
        (OLMOE, {"num_experts_per_tok": 65}, "num_experts_per_tok = 65: expected at most the 64"),
        (OLMOE, {"num_experts": 0}, "num_experts = 0"),
        (QWEN3_MOE, {"mlp_only_layers": [0]}, "mlp_only_layers = [0]"),
        (QWEN3_MOE, {"decoder_sparse_step": 2}, "decoder_sparse_step = 2"),
        (QWEN3_MOE, {"norm_topk_prob": 1}, "norm_topk_prob = 1"),
        (QWEN3_MOE, {"attention_bias": True}, "attention_bias = true"),
        (MIXTRAL, {"router_jitter_noise": 0.1}, "router_jitter_noise = 0.1"),
        (MIXTRAL, {"model_type": "mistral"}, "num_local_experts = 8"),
        (PYTHIA, {"attention_bias": False}, "attention_bias = false"),
        (PYTHIA, {"hidden_act": "relu"}, 'hidden_act = "relu"'),
        (PYTHIA, {"rotary_pct": 0.01}, "rotary_pct = 0.01"),
        (PYTHIA, {"rope_parameters": {"partial_rotary_factor": 2.0}}, "partial_rotary_factor = 2.0"),
        (PYTHIA, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, 'rope_type = "dynamic"'),
        (PYTHIA, {"num_attention_heads": 7}, "hidden_size = 512"),
        (PYTHIA, {"use_parallel_residual": 1}, "use_parallel_residual = 1"),
        (PYTHIA, {"model_type": "gpt_neox_japanese"}, 'model_type = "gpt_neox_japanese"'),
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
        (
            LLAMA,
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "partial_rotary_factor = 0.5: expected 1",
        ),
        (LLAMA, {"rope_scaling": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5"),
        (
            GEMMA3,
            {"rope_parameters": {"sliding_attention": {"partial_rotary_factor": 0.25}}},
            "partial_rotary_factor = 0.25",
        ),
        (LLAMA, {"model_type": "mistral", "sliding_window": 0}, "sliding_window = 0"),
        (PUBLISHED["qwen3-0.6b"], {"use_sliding_window": True}, "use_sliding_window"),
        (QWEN2, {"rope_scaling": {"type": "mrope"}}, 'rope_type = "mrope"'),
        (PUBLISHED["gemma-2b"], {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        (PUBLISHED["gemma-2b"], {"model_type": "gemma4"}, "gemma4"),
        (GEMMA2, {"final_logit_softcapping": 0.0}, "final_logit_softcapping"),
        (GEMMA3, {"layer_types": ["full_attention", *["sliding_attention"] * 25]}, "layer_types"),
        (GEMMA3, {"layer_types": ["full_attention"]}, "layer_types"),
        (GEMMA3, {"model_type": "gemma3"}, "text_config.model_type = none"),
        (PUBLISHED["gemma-3-4b"], {"text_config": {"model_type": "gemma9"}}, "gemma9"),
        (PUBLISHED["gemma-3-4b"], {"text_config": {"model_type": ["gemma3_text"]}}, "model_type"),
        (LLAMA, {"rope_scaling": {"type": "yarn", "factor": 4.0, "beta_slow": 1e-320}}, "beta_slow"),
        (LLAMA, {"rope_parameters": {"rope_type": "default"}}, "rope_scaling = \"llama3\""),
        (PUBLISHED["gemma-3-4b"], {"quantization_config": {"bits": 4}}, "quantization_config"),
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
                {
                    *LLAMA,
                    *GEMMA3,
                    *PYTHIA,
                    *PUBLISHED["gpt2"],
                    "layer_types",
                    "rope_parameters",
                    "n_inner",
                }
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
        assert sizes(made).total > 0
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


def test_a_file_and_a_missing_path_are_refused_as_such(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    for name, words in (
        (str(tmp_path / "config.json"), "a file; expected the directory that holds"),
        (str(tmp_path / "gone"), "no such directory"),
        ("./gone", "no such directory"),
        ("~/gone/too", "no such directory"),
    ):
        with pytest.raises(PlanError, match=words) as error:
            catalog.architecture(Plan(model=ModelChoice(name=name)))
        assert "stories" not in str(error.value)
    assert find_model("lama") is None


@pytest.mark.parametrize("base", ["owner/base", None])
def test_adapters_are_no_model_and_their_base_is_named(base: str | None, tmp_path: Path) -> None:
    named = {"base_model_name_or_path": base} if base else {}
    (tmp_path / "adapter_config.json").write_text(json.dumps(named))
    with pytest.raises(PlanError) as refused:
        find_model(str(tmp_path))
    of = '"owner/base"' if base else "another model"
    assert f": these are adapters of {of}, not a model; merge them first: " in str(refused.value)
    program, option, code, folder, out = shlex.split(str(refused.value).partition("first: ")[2])
    assert (program, option, folder, out) == ("python", "-c", str(tmp_path), "merged")
    compile(code, "the command", "exec")


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


def test_what_a_file_leaves_out_is_as_in_transformers() -> None:
    plain = {
        "vocab_size": 300, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "max_position_embeddings": 32_768,
    }  # fmt: skip

    def read(family: str, **more: Any) -> Architecture:
        return architecture_from_config({"model_type": family, **plain, **more}, "config.json")

    assert read("mistral").sliding_window == 4096
    assert read("mistral", sliding_window=None).sliding_window is None
    assert read("phi3").norm_eps == 1e-5
    assert read("llama").norm_eps == 1e-6
