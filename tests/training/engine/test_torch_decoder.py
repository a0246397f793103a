"""The torch decoder gives transformers' logits from the same weights, and attends as it says."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from memconsole.plan.models.architecture import Architecture, parameters
from memconsole_torch.models import pretrained
from memconsole_torch.models.decoder import Decoder, causal_attention, sliding_window_mask
from memconsole_torch.models.norms import RMSNorm
from memconsole_torch.models.rotary import rotate, rotation_of
from memconsole_trainer.engine import WeightsError
from memconsole_trainer.weights.huggingface import HuggingFaceWeights
from memconsole_trainer.weights.huggingface_names import extract, stored_as
from memconsole_trainer.weights.initialize import InitialWeights
from tests.training.harness import tiny_models

torch.set_num_threads(1)
CPU = torch.device("cpu")


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("shard", ["1GB", "20KB"], ids=["one-file", "sharded"])
@pytest.mark.parametrize("kind", tiny_models.ARCHITECTURES)
def test_a_saved_hugging_face_model_gives_transformers_logits(
    kind: str, shard: str, tmp_path: Path
) -> None:
    oracle = tiny_models.save(kind, tmp_path, shard)
    files = list(tmp_path.glob("*.safetensors"))
    assert (len(files) > 1) == (shard == "20KB")
    architecture = tiny_models.ARCHITECTURES[kind]
    weights = HuggingFaceWeights(tmp_path, architecture)
    decoder = pretrained.load(architecture, partial(Decoder, architecture), weights, CPU)
    for length in (
        40,
        24,
    ):  # longer and shorter than the rows of pretraining that scaled models name
        tokens = torch.from_numpy(tiny_models.tokens(length=length))
        with torch.no_grad():
            expected = oracle(input_ids=tokens.long()).logits
            assert relative_error(decoder.logits(tokens), expected) <= 1e-4


@pytest.mark.parametrize(
    "kind", ["granite", "olmo2", "gpt_neox", "gpt_neox-serial", "ministral3", "glm4"]
)
def test_gradients_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    architecture, oracle = tiny_models.ARCHITECTURES[kind], tiny_models.save(kind, tmp_path)
    weights = HuggingFaceWeights(tmp_path, architecture)
    decoder = pretrained.load(architecture, partial(Decoder, architecture), weights, CPU)
    tokens = torch.from_numpy(tiny_models.tokens().clip(1))  # transformers' padding has no gradient
    decoder.logits(tokens).log_softmax(-1)[..., 0].sum().backward()
    oracle(input_ids=tokens.long()).logits.log_softmax(-1)[..., 0].sum().backward()
    own, theirs = dict(decoder.named_parameters()), dict(oracle.named_parameters())
    for parameter in parameters(architecture):
        place, found = stored_as(parameter, architecture), own[parameter.name].grad
        assert place is not None
        assert found is not None
        name = place.name.replace("embed_out", "lm_head")  # files keep the older name
        whole = theirs[name].grad
        assert whole is not None
        expected = torch.from_numpy(extract(whole.numpy(), place, len(found)))
        assert relative_error(found, expected) <= 1e-4, parameter.name


def test_a_rotation_gives_the_same_in_the_operations_for_the_compiler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rotation = rotation_of(tiny_models.ARCHITECTURES["phi4-mini"], 20, local=False, device=CPU)
    assert rotation is not None
    x = torch.randn(2, 3, 20, 8, generator=torch.Generator().manual_seed(0))
    plain = rotate(x, rotation)
    assert torch.equal(plain[..., 6:], x[..., 6:])
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    torch.testing.assert_close(rotate(x, rotation), plain)


def test_every_module_parameter_is_canonical_in_name_shape_and_training() -> None:
    for architecture in (
        *tiny_models.ARCHITECTURES.values(),
        Architecture(
            family="gpt2",
            **tiny_models.SIZES,
            auxiliary_rows=10,
            diagnostic_classes=4,
        ),
    ):
        own = {n: (tuple(p.shape), p.requires_grad) for n, p in _meta(architecture)}
        assert own == {p.name: (p.shape, p.used) for p in parameters(architecture)}


def _meta(architecture: Architecture) -> list[tuple[str, torch.nn.Parameter]]:
    with torch.device("meta"):
        return list(Decoder(architecture).named_parameters())


def test_a_sliding_window_layer_sees_the_window_and_no_more() -> None:
    architecture = tiny_models.ARCHITECTURES["gemma3"]
    length, window = 17, 5
    random = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, length, 16, generator=random)
    k, v = torch.randn(2, 2, 2, length, 16, generator=random).unbind(0)
    mask = sliding_window_mask(architecture, length, torch.float32, CPU)
    found = causal_attention(q, k, v, mask, 0.25)
    for head in range(4):
        for i in range(length):
            first = max(0, i - window + 1)
            keys, values = (x[:, head // 2, first : i + 1] for x in (k, v))
            shares = torch.einsum("bd,bkd->bk", q[:, head, i], keys).mul(0.25).softmax(-1)
            expected = torch.einsum("bk,bkd->bd", shares, values)
            torch.testing.assert_close(found[:, head, i], expected, atol=1e-5, rtol=1e-5)


def test_no_mask_is_made_where_the_window_cuts_nothing() -> None:
    architecture = tiny_models.ARCHITECTURES["gemma3"]
    assert sliding_window_mask(architecture, 5, torch.float32, CPU) is None
    assert sliding_window_mask(architecture, 6, torch.float32, CPU) is not None


def test_later_tokens_never_change_earlier_predictions() -> None:
    for kind, architecture in tiny_models.ARCHITECTURES.items():
        decoder = pretrained.load(
            architecture, partial(Decoder, architecture), InitialWeights(architecture, 0), CPU
        )
        tokens = torch.from_numpy(tiny_models.tokens(rows=1, length=12))
        changed = tokens.clone()
        changed[0, 8:] = (changed[0, 8:] + 1) % 96
        with torch.no_grad():
            first, second = decoder.logits(tokens), decoder.logits(changed)
        torch.testing.assert_close(first[:, :8], second[:, :8], msg=kind)
        assert not torch.allclose(first[:, 8:], second[:, 8:])


def test_shared_keys_equal_repeated_keys() -> None:
    random = torch.Generator().manual_seed(0)
    q = torch.randn(1, 6, 9, 8, generator=random)
    k, v = torch.randn(2, 1, 2, 9, 8, generator=random).unbind(0)
    repeated = (x.repeat_interleave(3, dim=1) for x in (k, v))
    expected = F.scaled_dot_product_attention(q, *repeated, is_causal=True, scale=0.3)
    torch.testing.assert_close(causal_attention(q, k, v, None, 0.3), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_equals_the_composed_one_in_value_and_gradient(dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(0)
    x = torch.randn(3, 5, 16, generator=random).to(dtype).requires_grad_()
    weight = torch.randn(16, generator=random).requires_grad_()
    upstream = torch.randn(3, 5, 16, generator=random).to(dtype)

    def gradients(y: torch.Tensor) -> list[torch.Tensor]:
        return [y.detach(), *torch.autograd.grad(y, (x, weight), upstream)]

    found = gradients(RMSNorm.apply(x, weight, 1e-6, dtype))
    expected = gradients(F.rms_norm(x.float(), (16,), weight, 1e-6).to(dtype))
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(
            one, other, atol=1e-5, rtol=1e-5 if dtype == torch.float32 else 1e-2
        )


def test_a_weight_of_another_shape_is_refused_by_name() -> None:
    architecture = tiny_models.ARCHITECTURES["llama"]

    class Wrong:
        def tensor(self, name: str) -> np.ndarray:
            return np.zeros((3, 3), np.float32)

    with pytest.raises(WeightsError, match=r"embedding\.weight: shape \(3, 3\)"):
        pretrained.load(architecture, partial(Decoder, architecture), Wrong(), CPU)
