"""Gemma 2: scores and logits are capped as by definition, a part of the queries at a time, in both backends."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import Tensor

from memconsole.plan.tasks.language import MASKED
from memconsole_jax.models.attention import causal_attention
from memconsole_jax.techniques.activations import fused_loss as jax_loss
from memconsole_torch.models import capped_attention
from memconsole_torch.models.decoder import Decoder, sliding_window_mask
from memconsole_torch.techniques.activations import checkpointing, fused_loss
from memconsole_torch.tracing.trace_liveness import Liveness
from tests.training.harness import tiny_models

torch.set_num_threads(1)
ROWS, HEADS, KEYS, LENGTH, WIDTH = 2, 4, 2, 23, 8
SCALE, CAP, WINDOW = 0.7, 1.5, 6


def drawn(dtype: torch.dtype = torch.float32, length: int = LENGTH) -> list[Tensor]:
    """Queries, keys, and values that are a view, as the decoder's."""
    random = torch.Generator().manual_seed(0)
    q, k = (torch.randn(ROWS, n, length, WIDTH, generator=random) for n in (HEADS, KEYS))
    v = torch.randn(ROWS, length, KEYS, WIDTH, generator=random).transpose(1, 2)
    return [x.to(dtype).requires_grad_() for x in (q, k, v)]


def by_definition(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """In float64, with every score at once."""
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(HEADS // KEYS, 1) for x in (k, v))
    scores = CAP * torch.tanh(q @ k.mT * SCALE / CAP)
    ahead = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    scores = scores.masked_fill(ahead, -math.inf) if mask is None else scores + mask
    return torch.softmax(scores, -1) @ v


@pytest.mark.parametrize("windowed", [False, True])
def test_parts_of_the_queries_give_the_attention_and_gradients_of_all(
    windowed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capped_attention, "QUERIES", 7)
    mask = None
    if windowed:
        a = tiny_models.ARCHITECTURES["gemma2"]
        mask = sliding_window_mask(a, LENGTH, torch.float32, torch.device("cpu"))
    expected, found = drawn(), drawn()
    weights = torch.randn(ROWS, HEADS, LENGTH, WIDTH)
    out = capped_attention.capped_attention(*found, mask, SCALE, CAP)
    (out * weights).sum().backward()
    reference = by_definition(*expected, mask)
    (reference * weights).sum().backward()
    torch.testing.assert_close(out.double(), reference, atol=1e-6, rtol=1e-5)
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.grad, other.grad, atol=1e-5, rtol=1e-4)


def test_both_backends_cap_scores_alike() -> None:
    q, k, v = (x.detach() for x in drawn())
    expected = capped_attention.capped_attention(q, k, v, None, SCALE, CAP)
    arrays = [x.transpose(1, 2).numpy() for x in (q, k, v)]
    found = causal_attention(*arrays, SCALE, None, cap=CAP)  # type: ignore[arg-type]
    flat = expected.transpose(1, 2).reshape(ROWS, LENGTH, -1)
    np.testing.assert_allclose(found, flat.numpy(), atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_workspace_is_what_the_operators_allocate(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capped_attention, "QUERIES", 16)
    q, k, v = (x.detach() for x in drawn(dtype, 64))
    rest = (None, SCALE, CAP)
    for operator, workspace, given in (
        (capped_attention.capped_attention, capped_attention.forward_workspace, (q, k, v)),
        (capped_attention.capped_attention_backward, capped_attention.backward_workspace, (q, q, k, v)),
    ):  # fmt: skip
        live = Liveness(internal=False)
        with live:
            live.phase = "step"
            for tensor in given:
                live.ignore(tensor)
            made = operator.function(*given, *rest)
        results = sum(x.nbytes for x in (made if isinstance(made, tuple) else (made,)))
        expected = sum(workspace(*given, *rest))
        assert live.peaks["step"] - results == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize(("mode", "times"), [("none", 1), ("attention", 1), ("full", 2)])
def test_checkpointing_keeps_what_capped_attention_read(mode: Any, times: int) -> None:
    decoder = Decoder(tiny_models.ARCHITECTURES["gemma2"])
    torch.nn.init.normal_(decoder.embedding.weight)
    for weight in decoder.parameters():
        torch.nn.init.normal_(weight, std=0.1)
    checkpointing.apply(decoder, mode)
    seen = []

    class Seen(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Seen():
        decoder(torch.from_numpy(tiny_models.tokens())).sum().backward()
    layers = decoder.architecture.layers
    assert seen.count(capped_attention.OPERATOR) == times * layers
    assert seen.count(capped_attention.BACKWARD_OPERATOR) == layers


@pytest.mark.parametrize("chunked", [False, True])
def test_capped_logits_have_the_loss_and_gradients_of_the_definition(
    chunked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused_loss, "CPU_CACHED", 5 * 40)
    monkeypatch.setattr(jax_loss, "CPU_CHUNK_TOKENS", 8)
    random = torch.Generator().manual_seed(1)
    hidden, head = torch.randn(2, 9, 6, generator=random), torch.randn(40, 6, generator=random)
    targets = torch.randint(0, 40, (2, 9), generator=random)
    targets[1, 4:] = MASKED
    wide = [x.double().requires_grad_() for x in (hidden, head)]
    scores = CAP * torch.tanh(wide[0] @ wide[1].T / CAP)
    nats = torch.nn.functional.cross_entropy(
        scores.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum"
    )
    (0.5 * nats).backward()
    mine = [x.clone().requires_grad_() for x in (hidden, head)]
    if chunked:
        loss = fused_loss.chunked(*mine, targets, 7, share=0.5, cap=CAP)
    else:
        loss = fused_loss.whole(*mine, targets, share=0.5, cap=CAP)
    loss.backward()
    nats_of = jax_loss.chunked if chunked else jax_loss.whole
    arrays = jnp.asarray(hidden.numpy()), jnp.asarray(head.numpy())
    labels = jnp.asarray(targets.numpy())

    def total(hidden: Any, head: Any) -> Any:
        return nats_of(hidden, head, labels, 0.5, None, CAP)

    value, slopes = jax.value_and_grad(total, argnums=(0, 1))(*arrays)
    for found in (loss.item(), float(value)):
        assert found == pytest.approx(0.5 * nats.item(), rel=1e-5)
    for own, jaxs, expected in zip(mine, slopes, wide, strict=True):
        torch.testing.assert_close(own.grad.double(), expected.grad, atol=1e-5, rtol=1e-4)
        np.testing.assert_allclose(jaxs, expected.grad.numpy(), atol=1e-5)
