"""Hugging Face checkpoints written by transformers, read under this project's names."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from memconsole.plan.models.architecture import Architecture, parameters
from memconsole.plan.models.configs.families import read_architecture
from memconsole.plan.models.files import weight_files
from memconsole.plan.plan import PlanError
from memconsole_torch.models import pretrained
from memconsole_torch.models.decoder import Decoder
from memconsole_trainer.engine import WeightsError
from memconsole_trainer.weights.huggingface import HuggingFaceWeights, exported
from memconsole_trainer.weights.initialize import InitialWeights
from tests.training.harness import tiny_models

transformers = pytest.importorskip("transformers")

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def sizes(**more: object) -> dict[str, object]:
    base: dict[str, object] = {
        "vocab_size": 64,
        "hidden_size": 32,
        "layers": 2,
        "heads": 4,
        "kv_heads": 2,
        "head_size": 8,
        "intermediate_size": 48,
        "max_positions": 32,
    }
    return base | more


def model_and_architecture(kind: str) -> tuple[object, Architecture]:
    t = transformers
    if kind == "gpt2":
        config = t.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=32)
        return t.GPT2LMHeadModel(config), Architecture(
            family="gpt2",
            norm="layernorm",
            activation="gelu_tanh",
            gated_mlp=False,
            biases=True,
            positions="learned",
            **sizes(kv_heads=4, intermediate_size=128),
        )
    if kind in ("llama", "llama-untied"):
        tied = kind == "llama"
        config = t.LlamaConfig(**SMALL, tie_word_embeddings=tied)
        return t.LlamaForCausalLM(config), Architecture(
            family="llama", tied_embeddings=tied, **sizes()
        )
    if kind == "qwen3":
        config = t.Qwen3Config(**SMALL, tie_word_embeddings=True)
        return t.Qwen3ForCausalLM(config), Architecture(
            family="llama", query_key_norm=True, **sizes()
        )
    if kind == "gemma":
        config = t.GemmaConfig(**SMALL)
        return t.GemmaForCausalLM(config), Architecture(
            family="gemma", norm_unit_offset=True, activation="gelu_tanh", **sizes()
        )
    config = t.Gemma3TextConfig(**SMALL)
    return t.Gemma3ForCausalLM(config), Architecture(
        family="gemma3",
        norm_unit_offset=True,
        activation="gelu_tanh",
        query_key_norm=True,
        post_norms=True,
        **sizes(),
    )


KINDS = ["gpt2", "llama", "llama-untied", "qwen3", "gemma", "gemma3"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_weight_transformers_saved_is_found_and_nothing_is_left_over(
    kind: str, tmp_path: Path
) -> None:
    model, architecture = model_and_architecture(kind)
    model.save_pretrained(tmp_path)  # type: ignore[attr-defined]
    weights = HuggingFaceWeights(tmp_path, architecture)
    total = 0
    for parameter in parameters(architecture):
        tensor = weights.tensor(parameter.name)
        assert tensor.shape == parameter.shape
        total += tensor.size
    assert total == sum(p.numel() for p in model.parameters())  # type: ignore[attr-defined]


def test_gpt2_matrices_are_transposed_and_the_fused_projection_is_split(tmp_path: Path) -> None:
    model, architecture = model_and_architecture("gpt2")
    model.save_pretrained(tmp_path)  # type: ignore[attr-defined]
    weights = HuggingFaceWeights(tmp_path, architecture)
    block = model.transformer.h[1]  # type: ignore[attr-defined]
    fused = block.attn.c_attn.weight.detach().numpy()
    key = weights.tensor("layers.1.attention.key.weight")
    np.testing.assert_array_equal(key, fused[:, 32:64].T)
    up = weights.tensor("layers.1.mlp.up.weight")
    np.testing.assert_array_equal(up, block.mlp.c_fc.weight.detach().numpy().T)


def test_the_fused_projection_of_gpt_neox_is_split_head_by_head_and_masks_are_no_weights(
    tmp_path: Path,
) -> None:
    model = tiny_models.save("gpt_neox", tmp_path)
    file = tmp_path / "model.safetensors"
    masks = {
        "gpt_neox.layers.0.attention.bias": np.ones((1, 1, 128, 128), bool),
        "gpt_neox.layers.0.attention.masked_bias": np.float32([-1e9]),
        "gpt_neox.layers.0.attention.rotary_emb.inv_freq": np.ones(1, np.float32),
    }
    save_file({**load_file(file), **masks}, file, {"format": "pt"})
    weights = HuggingFaceWeights(tmp_path, tiny_models.ARCHITECTURES["gpt_neox"])
    fused = model.gpt_neox.layers[1].attention.query_key_value
    for name in ("weight", "bias"):
        whole = getattr(fused, name).detach().numpy()
        for part, start in (("query", 0), ("key", 8), ("value", 16)):
            found = weights.tensor(f"layers.1.attention.{part}.{name}")
            for head in range(4):
                own = whole[24 * head + start : 24 * head + start + 8]
                np.testing.assert_array_equal(found[8 * head : 8 * head + 8], own)


@pytest.mark.parametrize("kind", ["gpt2", "llama-untied", "gemma3"])
def test_exported_weights_load_back_into_transformers(kind: str, tmp_path: Path) -> None:
    model, architecture = model_and_architecture(kind)
    start = InitialWeights(architecture, 7)
    model.config.save_pretrained(tmp_path)  # type: ignore[attr-defined]
    save_file(dict(exported(architecture, start)), tmp_path / "model.safetensors", {"format": "pt"})
    loaded = type(model).from_pretrained(tmp_path)  # type: ignore[attr-defined]
    loaded.save_pretrained(tmp_path / "again")
    again = HuggingFaceWeights(tmp_path / "again", architecture)
    for parameter in parameters(architecture):
        np.testing.assert_array_equal(again.tensor(parameter.name), start.tensor(parameter.name))


def test_sharded_files_are_read_through_their_index(tmp_path: Path) -> None:
    model, architecture = model_and_architecture("llama-untied")
    model.save_pretrained(tmp_path / "one")  # type: ignore[attr-defined]
    model.save_pretrained(tmp_path / "many", max_shard_size="8KB")  # type: ignore[attr-defined]
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    one = HuggingFaceWeights(tmp_path / "one", architecture)
    many = HuggingFaceWeights(tmp_path / "many", architecture)
    for parameter in parameters(architecture):
        np.testing.assert_array_equal(one.tensor(parameter.name), many.tensor(parameter.name))


def test_experts_of_one_weight_may_be_in_several_files(tmp_path: Path) -> None:
    tiny_models.save("olmoe", tmp_path / "one")
    tensors = load_file(tmp_path / "one" / "model.safetensors")
    names, many = sorted(tensors), tmp_path / "many"
    many.mkdir()
    files = {f"part-{i}.safetensors": names[i::3] for i in range(3)}
    for file, own in files.items():
        save_file({name: tensors[name] for name in own}, many / file)
    index = {"weight_map": {name: file for file, own in files.items() for name in own}}
    (many / "model.safetensors.index.json").write_text(json.dumps(index))
    architecture = tiny_models.ARCHITECTURES["olmoe"]
    found = HuggingFaceWeights(many, architecture)
    whole = HuggingFaceWeights(tmp_path / "one", architecture)
    for parameter in parameters(architecture):
        np.testing.assert_array_equal(found.tensor(parameter.name), whole.tensor(parameter.name))


def test_the_files_that_transformers_reads_are_read_and_others_beside_them_are_not(
    tmp_path: Path,
) -> None:
    model, architecture = model_and_architecture("llama-untied")
    model.save_pretrained(tmp_path, max_shard_size="8KB")  # type: ignore[attr-defined]
    shards = sorted(tmp_path.glob("*.safetensors"))
    expected = HuggingFaceWeights(tmp_path, architecture).tensor("embedding.weight")
    other = {"layers.0.attention.wq.weight": np.zeros((32, 32), np.float32)}
    for name in ("consolidated.safetensors", "adapter_model.safetensors"):
        save_file(other, tmp_path / name)
    (tmp_path / "model.safetensors.index.json").unlink()
    assert weight_files(tmp_path) == shards  # parts without their index
    model.save_pretrained(tmp_path / "one")  # type: ignore[attr-defined]
    tensors = load_file(tmp_path / "one" / "model.safetensors")
    save_file({name: array + 1 for name, array in tensors.items()}, tmp_path / "model.safetensors")
    index = {"weight_map": dict.fromkeys(tensors, shards[0].name)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    found = HuggingFaceWeights(tmp_path, architecture).tensor("embedding.weight")
    np.testing.assert_array_equal(found, expected + 1)
    for file in (
        *shards,
        tmp_path / "model.safetensors",
        tmp_path / "model.safetensors.index.json",
    ):
        file.unlink()
    with pytest.raises(PlanError, match=r"holds no model\.safetensors, and no other"):
        weight_files(tmp_path)


def test_bfloat16_weights_come_as_the_float32_they_mean(tmp_path: Path) -> None:
    model, architecture = model_and_architecture("llama")
    model.bfloat16().save_pretrained(tmp_path)  # type: ignore[attr-defined]
    tensor = HuggingFaceWeights(tmp_path, architecture).tensor("layers.0.mlp.up.weight")
    assert tensor.dtype == np.float32
    expected = model.model.layers[0].mlp.up_proj.weight.detach().float().numpy()  # type: ignore[attr-defined]
    np.testing.assert_array_equal(tensor, expected)


def test_a_weight_without_a_place_is_refused_by_name(tmp_path: Path) -> None:
    model, architecture = model_and_architecture("llama")
    model.save_pretrained(tmp_path)  # type: ignore[attr-defined]
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros(32, dtype=np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=r"q_proj\.bias has no place"):
        HuggingFaceWeights(tmp_path, architecture)


def test_a_weight_of_another_shape_or_a_missing_one_is_refused_by_name(tmp_path: Path) -> None:
    model, architecture = model_and_architecture("llama")
    model.save_pretrained(tmp_path)  # type: ignore[attr-defined]
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {"model.norm.weight": np.zeros(33, dtype=np.float32)}, path)
    with pytest.raises(WeightsError, match=r"model\.norm\.weight is \(33,\)"):
        HuggingFaceWeights(tmp_path, architecture)
    del tensors["model.norm.weight"]
    save_file(tensors, path)
    with pytest.raises(WeightsError, match=r"no tensor model\.norm\.weight"):
        HuggingFaceWeights(tmp_path, architecture)


def test_an_expert_of_another_shape_or_a_missing_one_is_refused_by_name_and_shape(
    tmp_path: Path,
) -> None:
    tiny_models.save("qwen3_moe", tmp_path)
    architecture = tiny_models.ARCHITECTURES["qwen3_moe"]
    path, name = tmp_path / "model.safetensors", "model.layers.1.mlp.experts.5.down_proj.weight"
    tensors = load_file(path)
    right = tensors.pop(name)
    save_file(tensors, path)
    with pytest.raises(WeightsError, match=rf"no tensor {re.escape(name)} \(32, 48\)$"):
        HuggingFaceWeights(tmp_path, architecture)
    save_file(tensors | {name: right[:, :47].copy()}, path)
    with pytest.raises(WeightsError, match=r"5\.down_proj\.weight is \(32, 47\), .* \(32, 48\)$"):
        HuggingFaceWeights(tmp_path, architecture)


def test_experts_of_several_types_are_read_in_the_widest(tmp_path: Path) -> None:
    tiny_models.save("qwen3_moe", tmp_path)
    architecture = tiny_models.ARCHITECTURES["qwen3_moe"]
    path, own = tmp_path / "model.safetensors", "layers.0.mlp.up.weight"
    wide = np.split(HuggingFaceWeights(tmp_path, architecture).tensor(own), architecture.experts)
    first = "model.layers.0.mlp.experts.0.up_proj.weight"
    tensors = load_file(path)
    save_file(tensors | {first: tensors[first].astype(np.float16)}, path)
    found = np.split(HuggingFaceWeights(tmp_path, architecture).tensor(own), architecture.experts)
    np.testing.assert_array_equal(found[1:], wide[1:])
    np.testing.assert_allclose(found[0], wide[0], atol=1e-3)


def test_a_truncated_file_and_an_index_leading_outside_are_refused(tmp_path: Path) -> None:
    model, architecture = model_and_architecture("llama")
    model.save_pretrained(tmp_path)  # type: ignore[attr-defined]
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(WeightsError, match="truncated"):
        HuggingFaceWeights(tmp_path, architecture)
    path.unlink()
    index = {"weight_map": {"model.norm.weight": "../model.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(WeightsError, match="outside its directory"):
        HuggingFaceWeights(tmp_path, architecture)


def test_tensors_that_are_no_weights_of_their_own_are_reported(tmp_path: Path) -> None:
    model, architecture = model_and_architecture("llama")
    model.save_pretrained(tmp_path)  # type: ignore[attr-defined]
    whole = HuggingFaceWeights(tmp_path, architecture).read
    assert "not used" not in whole
    path = tmp_path / "model.safetensors"
    constants = [f"model.layers.{n}.self_attn.rotary_emb.inv_freq" for n in range(4)]
    file = {**load_file(path), **{name: np.ones(4, np.float32) for name in constants}}
    save_file(file, path, metadata={"format": "pt"})
    read = HuggingFaceWeights(tmp_path, architecture).read
    assert read == f"{whole}; not used: {', '.join(constants[:3])} and 1 more"


def test_a_head_beside_a_tied_embedding_has_to_be_its_copy(tmp_path: Path) -> None:
    model, architecture = model_and_architecture("llama")
    model.save_pretrained(tmp_path)  # type: ignore[attr-defined]
    path = tmp_path / "model.safetensors"
    file = load_file(path)
    head = file["model.embed_tokens.weight"].copy()
    save_file({**file, "lm_head.weight": head}, path, metadata={"format": "pt"})
    assert "not used: lm_head.weight" in HuggingFaceWeights(tmp_path, architecture).read
    head[0, 0] += 1
    save_file({**file, "lm_head.weight": head}, path, metadata={"format": "pt"})
    with pytest.raises(WeightsError, match="tie_word_embeddings"):
        HuggingFaceWeights(tmp_path, architecture)


def seeing(kind: str) -> Any:
    """A small random model of transformers that also sees images."""
    if kind == "gemma3":
        text = {
            **SMALL,
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 8,
        }
        vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
                  "num_attention_heads": 2, "image_size": 28, "patch_size": 14}  # fmt: skip
        return transformers.Gemma3ForConditionalGeneration(
            transformers.Gemma3Config(
                text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=3
            )
        )
    ids = {f"{name}_token_id": n for n, name in enumerate(("image", "video", "vision_start"), 3)}
    vision = {"hidden_size": 16, "intermediate_size": 16, "depth": 1, "num_heads": 2,
              "out_hidden_size": SMALL["hidden_size"]}  # fmt: skip
    sections = {"mrope_section": [2, 1, 1], "rope_type": "default", "rope_theta": 5e5}
    text = {**SMALL, "rope_parameters": sections}
    if kind == "qwen2_5_vl":
        config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision, **ids)
        return transformers.Qwen2_5_VLForConditionalGeneration(config)
    vision["deepstack_visual_indexes"] = [0]
    config = transformers.Qwen3VLConfig(text_config=text, vision_config=vision, **ids)
    return transformers.Qwen3VLForConditionalGeneration(config)


@pytest.mark.parametrize("kind", ["gemma3", "qwen2_5_vl", "qwen3_vl"])
def test_a_model_that_sees_images_gives_its_language_model(kind: str, tmp_path: Path) -> None:
    model = seeing(kind).eval()
    model.save_pretrained(tmp_path)
    architecture = read_architecture(str(tmp_path))
    found = HuggingFaceWeights(tmp_path, architecture)
    assert found.read.endswith("; not used: what sees images")
    tokens = torch.arange(20)[None]
    decoder = pretrained.load(
        architecture, partial(Decoder, architecture), found, torch.device("cpu")
    )
    with torch.no_grad():
        expected = model(input_ids=tokens + 6).logits
        torch.testing.assert_close(decoder.logits(tokens + 6), expected, atol=1e-4, rtol=1e-4)
