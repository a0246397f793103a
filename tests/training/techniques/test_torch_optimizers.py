"""torch's update rules equal Optax's, and the chunked loss and checkpointing save what they say."""

from __future__ import annotations

import collections
import itertools
import math
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from memconsole.plan import plan as plans
from memconsole.plan.plan import Plan
from memconsole_torch.models import linear, pretrained
from memconsole_torch.models.decoder import Decoder
from memconsole_torch.techniques.activations import checkpointing, fused_loss
from memconsole_torch.techniques.optimizer import optimizers
from memconsole_trainer.weights.initialize import InitialWeights
from tests.training.harness import tiny_models

torch.set_num_threads(1)
CPU = torch.device("cpu")
RATE = 3e-2


def a_decoder(layers: int = 3, *, parallel_residual: bool = False) -> Decoder:
    architecture = msgspec.structs.replace(
        tiny_models.ARCHITECTURES["llama"], layers=layers, parallel_residual=parallel_residual
    )
    return pretrained.load(
        architecture, partial(Decoder, architecture), InitialWeights(architecture, 1), CPU
    )


def some_gradients(decoder: Decoder, step: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(step)
    return {
        name: random.standard_normal(p.shape, dtype=np.float32) * np.float32(scale)
        for (name, p), scale in zip(decoder.named_parameters(), itertools.cycle([1, 1e-3, 1e-6]))
    }


def optax_rule(name: str, t: Any, decays: dict[str, bool]) -> Any:
    optax = pytest.importorskip("optax")
    if name == "adamw":
        return optax.adamw(RATE, t.beta1, t.beta2, t.epsilon, weight_decay=0.1, mask=decays)
    if name == "lion":
        return optax.lion(RATE, t.beta1, t.beta2, weight_decay=0.1, mask=decays)
    decayed = optax.add_decayed_weights(0.1, mask=decays)
    if name == "sgd":
        return optax.chain(decayed, optax.sgd(RATE, t.beta1))
    return optax.chain(
        optax.scale_by_factored_rms(min_dim_size_to_factor=2),
        optax.clip_by_block_rms(1.0),
        optax.scale_by_param_block_rms(1e-3),
        decayed,
        optax.scale_by_learning_rate(RATE),
    )


@pytest.mark.parametrize("clip", [0.0, 1.0], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("name", ["adamw", "lion", "sgd", "adafactor"])
def test_five_updates_equal_optax(name: str, clip: float) -> None:
    jax, optax = pytest.importorskip("jax"), pytest.importorskip("optax")
    plan = plans.replace(Plan(), {"optimize.optimizer": name, "train.weight_decay": 0.1})
    decoder = a_decoder(layers=1)
    optimizer = optimizers.create(plan, decoder)
    optimizers.set_learning_rate(optimizer, RATE)
    own = dict(decoder.named_parameters())
    theirs = {n: p.detach().numpy().copy() for n, p in own.items()}
    rule = optax_rule(name, plan.train, {n: p.dim() > 1 for n, p in own.items()})
    if clip:
        rule = optax.chain(optax.clip_by_global_norm(clip), rule)
    state = rule.init(theirs)
    update = jax.jit(rule.update)
    for step in range(5):
        gradients = some_gradients(decoder, step)
        updates, state = update(gradients, state, theirs)
        theirs = optax.apply_updates(theirs, updates)
        for n, p in own.items():
            p.grad = torch.from_numpy(gradients[n].copy())  # clipped in place
        optimizers.clip([p.grad for p in own.values() if p.grad is not None], clip)
        optimizer.step()
    for n, p in own.items():
        np.testing.assert_allclose(p.detach().numpy(), theirs[n], atol=2e-6, rtol=2e-6, err_msg=n)


def test_clipping_scales_to_the_bound_and_leaves_small_gradients_alone() -> None:
    gradients = [torch.tensor([3.0, 0.0]), torch.tensor([[4.0]])]
    assert float(optimizers.clip(gradients, 1.0)) == 5.0
    torch.testing.assert_close(gradients[0], torch.tensor([0.6, 0.0]), rtol=0, atol=1e-7)
    small = [torch.tensor([0.3, 0.4])]
    assert float(optimizers.clip(small, 1.0)) == 0.5
    assert small[0].tolist() == torch.tensor([0.3, 0.4]).tolist()


@pytest.mark.parametrize(
    ("name", "moments"),
    [
        ("adamw", lambda shape: 2 * math.prod(shape)),
        ("lion", math.prod),
        ("sgd", math.prod),
        ("adafactor", sum),
    ],
)
def test_state_holds_the_moments_and_nothing_more(name: str, moments: Any) -> None:
    plan = plans.replace(Plan(), {"optimize.optimizer": name})
    decoder = a_decoder()
    optimizer = optimizers.create(plan, decoder)
    held = sum(t.untyped_storage().nbytes() for _, t in optimizers.slots(optimizer, decoder))
    assert held == 4 * sum(moments(p.shape) for p in decoder.parameters())


def masked_example() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, 7, 16, generator=random).requires_grad_()
    weight = torch.randn(50, 16, generator=random).requires_grad_()
    targets = torch.randint(0, 50, (3, 7), generator=random, dtype=torch.int32)
    targets[0, :4] = targets[2, 6] = -100
    return hidden, weight, targets


@pytest.mark.parametrize("chunk", [1, 5, 21, 100])
def test_the_chunked_loss_and_its_gradients_equal_float64(chunk: int) -> None:
    hidden, weight, targets = masked_example()
    found = fused_loss.chunked(hidden, weight, targets, chunk)
    by_hidden, by_weight = torch.autograd.grad(found * 0.25, (hidden, weight))
    wide_hidden, wide_weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    scores = (wide_hidden @ wide_weight.T).log_softmax(-1).flatten(0, 1)
    kept = targets.flatten() != -100
    rows = targets.flatten().long()[kept][:, None]
    expected = -scores[kept].gather(1, rows).sum()
    expected_gradients = torch.autograd.grad(expected * 0.25, (wide_hidden, wide_weight))
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    torch.testing.assert_close(by_hidden.double(), expected_gradients[0], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(by_weight.double(), expected_gradients[1], atol=1e-6, rtol=1e-5)
    with torch.no_grad():
        assert fused_loss.chunked(hidden, weight, targets, chunk).item() == found.item()


def test_the_bf16_chunked_loss_is_summed_in_fp32() -> None:
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(4096, 16, generator=random).bfloat16().requires_grad_()
    weight = torch.randn(300, 16, generator=random).requires_grad_()
    targets = torch.randint(0, 300, (4096,), generator=random)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = fused_loss.chunked(hidden, weight, targets, 64)
    logits = hidden.double() @ weight.double().T
    expected = torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(expected.item(), rel=1e-3)
    by_hidden, by_weight = torch.autograd.grad(found, (hidden, weight))
    assert (by_hidden.dtype, by_weight.dtype) == (torch.bfloat16, torch.float32)
    (exact,) = torch.autograd.grad(expected, weight)
    assert float((by_weight - exact).norm() / exact.norm()) < 5e-3


def saved_bytes(decoder: Decoder, tokens: torch.Tensor, loss: Any) -> int:
    """Bytes of activations that autograd keeps at the end of the forward pass, weights left out."""
    weights = {p.untyped_storage().data_ptr() for p in decoder.parameters()}
    storages: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        hidden = decoder(tokens)
        result = loss(hidden, decoder.head_weight, tokens)
    assert result.requires_grad
    return sum(storages.values())


def test_checkpointing_keeps_less_and_full_keeps_only_block_inputs() -> None:
    tokens = torch.from_numpy(tiny_models.tokens(rows=8, length=64))
    kept = {}
    for mode in ("none", "full"):
        decoder = a_decoder()
        checkpointing.apply(decoder, mode)  # type: ignore[arg-type]
        kept[mode] = saved_bytes(decoder, tokens, lambda hidden, weight, targets: hidden.sum())
    block_input = 8 * 64 * 32 * 4
    assert kept["full"] < 6 * block_input  # three blocks, the final norm, rotations
    assert kept["full"] < 0.3 * kept["none"]


class Runs(TorchDispatchMode):
    """Counts the operations that really run."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: collections.Counter[Any] = collections.Counter()

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.counts[operation] += 1
        return operation(*args, **(kwargs or {}))


@pytest.mark.parametrize("onednn", [False, True])
def test_checkpointing_runs_nothing_twice_that_it_keeps(
    onednn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "_is_faster", lambda: onednn)
    monkeypatch.setattr(linear, "LEAST", 0)
    monkeypatch.setattr(linear, "LEAST_ROWS", 0)
    matmuls, attentions, products = {}, {}, {}
    for mode in ("none", "selective", "attention", "full"):
        decoder = a_decoder()
        checkpointing.apply(decoder, mode)  # type: ignore[arg-type]
        with Runs() as runs:
            decoder(torch.from_numpy(tiny_models.tokens())).sum().backward()
        aten = torch.ops.aten
        matmuls[mode] = runs.counts[aten.mm.default]
        matmuls[mode] += sum(n for op, n in runs.counts.items() if "_linear_pointwise" in op.name())
        attentions[mode] = runs.counts[aten._scaled_dot_product_flash_attention_for_cpu.default]
        products[mode] = runs.counts[aten.silu.default]
    assert matmuls["selective"] == matmuls["none"] < matmuls["attention"] == matmuls["full"]
    assert attentions == {"none": 3, "selective": 3, "attention": 3, "full": 6}
    assert products == {"none": 3, "selective": 6, "attention": 6, "full": 6}


def test_checkpointing_never_computes_the_projection_of_a_parallel_block_again() -> None:
    tokens, aten = torch.from_numpy(tiny_models.tokens()), torch.ops.aten
    matmuls, gradients = {}, {}
    for mode in ("none", "selective", "attention", "full"):
        decoder = a_decoder(parallel_residual=True)
        checkpointing.apply(decoder, mode)  # type: ignore[arg-type]
        with Runs() as runs:
            decoder(tokens).sum().backward()
        matmuls[mode] = runs.counts[aten.mm.default]
        gradients[mode] = [p.grad for p in decoder.parameters() if p.grad is not None]
    assert matmuls["selective"] == matmuls["none"]
    assert matmuls["full"] - matmuls["attention"] == len(decoder.layers)
    for mode in ("selective", "attention", "full"):
        for one, plain in zip(gradients[mode], gradients["none"], strict=True):
            torch.testing.assert_close(one, plain)


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that an operation makes."""

    elements = 0

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        made = operation(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor):
            self.elements = max(self.elements, made.numel())
        return made


def test_the_chunked_loss_makes_no_whole_logits_and_the_whole_loss_makes_them_once() -> None:
    tokens = torch.from_numpy(tiny_models.tokens(rows=8, length=64))
    decoder = a_decoder()
    made = {}
    for loss in (fused_loss.whole, partial(fused_loss.chunked, chunk=64)):
        with Largest() as largest, Runs() as runs:
            loss(decoder(tokens), decoder.head_weight, tokens).backward()
        made[loss is fused_loss.whole] = largest.elements, runs.counts
    logits = tokens.numel() * decoder.head_weight.shape[0]
    assert made[True][0] == logits > made[False][0]
    assert made[True][1][torch.ops.aten._log_softmax.default] == 0
