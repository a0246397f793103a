"""Linear layers whose large products oneDNN computes: the same numbers as torch's own, with the same gradients."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from memconsole_torch.models import linear
from tests.training.harness import adapted

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN"
)


class Ran(TorchDispatchMode):
    """Counts the operations that run, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.counts[operation.name()] += 1
        return operation(*args, **(kwargs or {}))


@pytest.fixture(autouse=True, params=[False, True], ids=["faster", "far faster"])
def far(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """As on a processor where oneDNN is faster, or far faster, for products of every size. Returns whether far."""
    monkeypatch.setattr(linear, "_is_faster", lambda: True)
    monkeypatch.setattr(linear, "_is_far_faster", lambda: request.param)
    for least in ("LEAST", "LEAST_FAR", "LEAST_OUTER", "LEAST_ROWS"):
        monkeypatch.setattr(linear, least, 0)
    return bool(request.param)


def a_layer(**options: Any) -> tuple[linear.Linear, torch.Tensor, torch.Tensor]:
    """A layer, its input and the gradient of its output."""
    generator = torch.Generator().manual_seed(0)
    layer = linear.Linear(48, 80, **options)
    for p in layer.parameters():
        p.data = torch.randn(p.shape, generator=generator)
    x = torch.randn(3, 20, 48, generator=generator)
    return layer, x, torch.randn(3, 20, 80, generator=generator)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
def test_output_and_gradients_are_those_of_torch(bias: bool, frozen: bool) -> None:
    layer, x, gradient = a_layer(bias=bias)
    layer.requires_grad_(not frozen)
    found = []
    for function in (linear.linear, F.linear):
        rows = x.clone().requires_grad_()
        layer.zero_grad()
        y = function(rows, layer.weight, layer.bias)
        y.backward(gradient)
        found.append([y, rows.grad, *(p.grad for p in layer.parameters())])
    for ours, theirs in zip(*found, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_onednn_computes_the_gradient_of_the_weight_only_where_it_is_far_faster(far: bool) -> None:
    layer, x, gradient = a_layer()
    with Ran() as ran:
        layer(x.requires_grad_()).backward(gradient)
    assert ran.counts["mkldnn::_linear_pointwise"] == (3 if far else 2)
    assert ran.counts["aten::mm"] == (0 if far else 1)
    assert ran.counts["aten::addmm"] == 0


@pytest.mark.parametrize("shape", [(700, 80, 48), (700, 48, 80), (1, 48, 80), (64, 300, 7)])
@pytest.mark.parametrize("strided", ["", "slopes", "rows"])
@pytest.mark.parametrize("added", [True, False])
def test_the_gradient_of_a_weight_is_summed_over_parts(
    shape: tuple[int, int, int], strided: str, added: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("OUTER_ROWS", 200), ("OUTER_ELEMENTS", 80 * 20), ("OUTER_COLUMNS", 16)):
        monkeypatch.setattr(linear, name, value)
    count, outputs, inputs = shape
    generator = torch.Generator().manual_seed(0)
    slopes, rows = (torch.randn(count, n + 3, generator=generator) for n in (outputs, inputs))
    slopes, rows = slopes[:, :outputs], rows[:, :inputs]
    slopes = slopes if strided == "slopes" else slopes.contiguous()
    rows = rows if strided == "rows" else rows.contiguous()
    start = torch.randn(outputs, inputs, generator=generator)
    total = start.clone() if added else None
    found = linear.outer(slopes, rows, total)
    expected = slopes.double().T @ rows.double() + (start.double() if added else 0)
    assert (found is total) == added
    assert found.is_contiguous()
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-3)


def test_the_gradient_may_be_strided() -> None:
    layer, x, _ = a_layer(bias=False)
    gradient = torch.randn(3, 80, 20).transpose(1, 2)
    rows = x.requires_grad_()
    layer(rows).backward(gradient)
    torch.testing.assert_close(rows.grad, gradient @ layer.weight, rtol=1e-4, atol=1e-4)


def test_16_bits_and_small_products_stay_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x, _ = a_layer()
    with Ran() as ran, torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
    assert not ran.counts["mkldnn::_linear_pointwise"]
    monkeypatch.setattr(linear, "LEAST", 3 * 20 * 48 * 80 + 1)
    monkeypatch.setattr(linear, "LEAST_FAR", 3 * 20 * 48 * 80 + 1)
    with Ran() as ran:
        layer(x)
    assert not ran.counts["mkldnn::_linear_pointwise"]


def test_other_processors_stay_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x, _ = a_layer()
    monkeypatch.setattr(linear, "_is_faster", lambda: False)
    with Ran() as ran:
        layer(x)
    assert not ran.counts["mkldnn::_linear_pointwise"]


def test_the_compiler_sees_one_graph() -> None:
    layer, x, _ = a_layer()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), layer(x), rtol=1e-4, atol=1e-4)


def test_a_vector_and_a_few_rows_stay_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x, _ = a_layer()
    monkeypatch.setattr(linear, "LEAST_ROWS", 32)
    with Ran() as ran:
        layer(x[0, 0]), layer(x[0])
    assert not ran.counts["mkldnn::_linear_pointwise"]


WHOLE = {"optimize.lora_rank": 0, "optimize.freeze_base": False}
TRAINED: tuple[dict[str, Any], ...] = (
    {},
    WHOLE,
    WHOLE | {"optimize.gradient_checkpointing": "full"},
    WHOLE | {"optimize.gradient_checkpointing": "selective"},
    WHOLE | {"optimize.activation_offload": True},
    {"optimize.gradient_checkpointing": "attention", "optimize.base_storage": "nf4"},
)
"""Changes of a plan that trains adapters on a frozen base."""


@pytest.mark.parametrize("changes", TRAINED)
def test_a_run_trains_as_with_torchs_own_products(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = []
    for preferred in (True, False):
        monkeypatch.setattr(linear, "_is_faster", lambda preferred=preferred: preferred)
        plan = adapted.plan_with("torch", changes)
        engine = adapted.built(plan)
        with Ran() as ran:
            for step in range(4):
                engine.train_step(adapted.batch(plan, step))
        assert bool(ran.counts["mkldnn::_linear_pointwise"]) == preferred
        losses.append([metrics.loss for metrics in engine.take_metrics()])
    np.testing.assert_allclose(*losses, rtol=1e-5)
