"""Mixtures of experts in torch: their operators against plain autograd, and what they hold."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from memconsole.memory.activations.torch_step import moments
from memconsole.memory.state.step_sizes import step_of
from memconsole.plan.models.architecture import Architecture
from memconsole.plan.plan import Plan, replace
from memconsole_torch.models import expert_matrices, expert_products
from memconsole_torch.models.experts import Experts
from memconsole_torch.techniques.weights.quantized_base import QuantizedStack
from memconsole_torch.tracing.trace_step import trace
from memconsole_trainer.techniques.base_storage import SCALES, dequantize, quantize
from tests.training.harness.tiny_models import ARCHITECTURES

torch.set_num_threads(1)
MODEL = ARCHITECTURES["qwen3_moe"]
KINDS = ("mixtral", "qwen3_moe", "olmoe", "granite_moe")


@pytest.fixture(params=["one by one", "together", "in parts"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How products are computed: expert by expert, for a few rows of an expert at a time, or all by one call."""
    monkeypatch.setattr(expert_products, "grouped", lambda *_: request.param == "together")
    if request.param == "in parts":
        monkeypatch.setattr(expert_products, "ROWS", 5)
    return str(request.param)


def mixture(a: Architecture, dtype: torch.dtype = torch.float32) -> Experts:
    module = Experts(a)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(0.2 * torch.randn(p.shape, generator=generator))
    return module.to(dtype)


def plainly(module: Experts, a: Architecture, x: Tensor) -> Tensor:
    """The same of whole products, with autograd's own gradients."""
    f, h = a.intermediate_size, a.hidden_size
    shares, picked = (x @ module.router.weight.T).softmax(-1).topk(a.experts_per_token)
    if a.normalized_shares:
        shares = shares / shares.sum(-1, keepdim=True)
    gates, ups, downs = (
        m.weight.view(a.experts, rows, -1)
        for m, rows in ((module.gate, f), (module.up, f), (module.down, h))
    )
    inner = F.silu(torch.einsum("bth,efh->btef", x, gates)) * torch.einsum("bth,efh->btef", x, ups)
    every = torch.einsum("btef,ehf->bteh", inner, downs)
    chosen = every.gather(2, picked[..., None].expand(*picked.shape, h))
    return (chosen * shares[..., None]).sum(2)


def gradients(module: Experts, x: Tensor, y: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad((y * y.detach().cos()).sum(), [x, *module.parameters()]))


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_and_gradients_are_those_of_whole_products(kind: str, way: str) -> None:
    a = ARCHITECTURES[kind]
    module, x = mixture(a), torch.randn(2, 19, a.hidden_size).requires_grad_()
    wanted, found = plainly(module, a, x), module(x)
    torch.testing.assert_close(found, wanted)
    for own, other in zip(gradients(module, x, found), gradients(module, x, wanted), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-5)


def test_in_bf16_they_are_close_to_those_in_fp32(way: str) -> None:
    wide, narrow = mixture(MODEL), mixture(MODEL, torch.bfloat16)
    with torch.no_grad():
        for one, other in zip(wide.parameters(), narrow.parameters(), strict=True):
            one.copy_(other.float())
        # Rounding does not change which experts are chosen where the last one is well above the next.
        rows = torch.randn(200, MODEL.hidden_size, generator=torch.Generator().manual_seed(0))
        scores = wide.router(rows).sort(-1, descending=True).values
        clear = scores[:, MODEL.experts_per_token - 1] - scores[:, MODEL.experts_per_token]
        x = rows[clear.argsort(descending=True)[:38]].view(2, 19, -1)
    inputs = x.bfloat16().requires_grad_(), x.bfloat16().float().requires_grad_()
    outputs = narrow(inputs[0]), wide(inputs[1])
    torch.testing.assert_close(outputs[0].float(), outputs[1], rtol=0.05, atol=0.05)
    found = zip(
        gradients(narrow, inputs[0], outputs[0]),
        gradients(wide, inputs[1], outputs[1]),
        strict=True,
    )
    for own, other in found:
        assert (own.float() - other).norm() < 0.05 * other.norm()


def test_rows_that_one_call_cannot_read_are_computed_expert_by_expert(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`grouped_mm` refuses 16-bit rows whose width is no multiple of 8, on a CPU as on a GPU."""
    monkeypatch.setattr(expert_matrices, "has_grouped", lambda *_: True)
    for hidden, inner in ((32, 23), (36, 24), (32, 24)):
        a = msgspec.structs.replace(MODEL, hidden_size=hidden, intermediate_size=inner)
        module = mixture(a, torch.bfloat16)
        x = torch.randn(2, 19, hidden).bfloat16().requires_grad_()
        found = module(x)
        assert all(gradient.any() for gradient in gradients(module, x, found))


def test_an_expert_without_tokens_has_gradients_of_zero(way: str) -> None:
    module = mixture(MODEL)
    with torch.no_grad():  # the last expert is never among the first three
        module.router.weight.copy_(torch.zeros_like(module.router.weight))
        module.router.weight[:3] = 1.0
    x = torch.rand(1, 11, MODEL.hidden_size).requires_grad_()
    _, by_router, by_gate, by_up, by_down = gradients(module, x, module(x))
    assert torch.isfinite(by_router).all()
    for gradient in (by_gate, by_up, by_down):
        of_experts = gradient.view(MODEL.experts, -1).abs().sum(1)
        assert (of_experts[:3] > 0).all()
        assert not of_experts[3:].any()


@pytest.mark.parametrize("storage", ["int8", "nf4"])
@pytest.mark.parametrize("inner", [48, 24])
def test_frozen_experts_in_codes_compute_what_the_codes_say(
    storage: Any, inner: int, way: str
) -> None:
    """With 24 inner values and rows of 36, an expert's matrix begins inside a block of codes."""
    hidden = 32 if inner == 48 else 36
    a = msgspec.structs.replace(MODEL, intermediate_size=inner, hidden_size=hidden)
    plain, coded = mixture(a), mixture(a)
    for name in ("gate", "up", "down"):
        weight = getattr(plain, name).weight
        codes, scales = quantize(weight.detach().numpy(), storage)
        stack = QuantizedStack(getattr(coded, name), storage)
        stack.weight.copy_(torch.from_numpy(codes))
        getattr(stack, "weight" + SCALES).copy_(torch.from_numpy(scales))
        setattr(coded, name, stack)
        with torch.no_grad():
            decoded = dequantize(codes, scales, tuple(weight.shape), storage)
            weight.copy_(torch.from_numpy(np.ascontiguousarray(decoded)))
    inputs = [torch.randn(2, 7, hidden, generator=torch.Generator().manual_seed(0)) for _ in "ab"]
    found = []
    for module, x in zip((coded, plain), inputs, strict=True):
        y = module(x.requires_grad_())
        (by_x,) = torch.autograd.grad(y.square().sum(), x)
        found.append((y, by_x))
    for own, other in zip(*found, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-5)


def test_products_of_16_bits_have_few_shapes_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN keeps a kernel for each."""
    shapes, product = set(), expert_products.product

    def recorded(rows: Tensor, matrix: Tensor) -> Tensor:
        shapes.add(len(rows))
        return product(rows, matrix)

    monkeypatch.setattr(expert_products, "product", recorded)
    module = mixture(MODEL, torch.bfloat16)
    for length in range(20, 300, 19):
        x = torch.randn(1, length, MODEL.hidden_size).bfloat16().requires_grad_()
        module(x).sum().backward()
    assert shapes <= {64, 128, 192, 256, 320}


def test_the_loss_for_balance_adds_its_gradient() -> None:
    module, x = mixture(MODEL), torch.randn(2, 19, MODEL.hidden_size).requires_grad_()
    plain = gradients(module, x, module(x))
    scores = (x.flatten(0, 1) @ module.router.weight.T).softmax(-1)
    shares = F.one_hot(scores.topk(MODEL.experts_per_token).indices, MODEL.experts).float().mean(0)
    loss = MODEL.experts * (shares.sum(0) * scores.mean(0)).sum()
    added = torch.autograd.grad(0.3 * loss, [x, module.router.weight])
    module.balance.weight, module.balance.scale = 0.1, 3.0
    found = gradients(module, x, module(x))
    for index, extra in enumerate(added):
        torch.testing.assert_close(found[index], plain[index] + extra, rtol=1e-4, atol=1e-6)
    for own, other in zip(found[2:], plain[2:], strict=True):
        torch.testing.assert_close(own, other)
    with torch.no_grad():
        torch.testing.assert_close(module(x), plainly(module, MODEL, x))


PLANS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bf16": {"optimize.precision": "bf16"},
    "bf16, adapters of queries and values": {
        "optimize.precision": "bf16",
        "optimize.lora_rank": 4,
        "optimize.freeze_base": True,
        "optimize.lora_targets": "query-value",
    },
    "nf4": {
        "optimize.lora_rank": 4,
        "optimize.freeze_base": True,
        "optimize.base_storage": "nf4",
        "optimize.gradient_checkpointing": "selective",
    },
    "attention kept": {"optimize.gradient_checkpointing": "attention"},
    "updated in the backward pass": {
        "optimize.optimizer_in_backward": True,
        "train.grad_clip": 0.0,
        "optimize.optimizer": "adamw-8bit",
    },
}


@pytest.mark.parametrize(
    ("kind", "name", "inner"),
    [
        *((kind, name, 256) for kind in ("cpu", "gpu") for name in PLANS),
        ("gpu", "bf16, adapters of queries and values", 250),
        ("gpu", "bf16", 250),
    ],
)
def test_the_formula_knows_what_a_step_holds(kind: str, name: str, inner: int) -> None:
    """With 250 inner values a GPU computes expert by expert in 16 bits, too."""
    a = msgspec.structs.replace(
        MODEL, hidden_size=512, intermediate_size=inner, head_size=64, max_positions=512
    )
    plan = replace(Plan(), {"data.sequence_length": 200, "train.batch_size": 4, **PLANS[name]})
    expected: dict[str, int] = {}
    for moment in moments(step_of(plan, a, kind)):
        expected[moment.phase] = max(expected.get(moment.phase, 0), moment.total)
    peaks = trace(plan, a, kind, steps=1).peaks
    for phase in ("forward", "loss", "backward", "optimizer step", "evaluation"):
        assert expected[phase] == pytest.approx(peaks[phase], rel=0.01), phase
