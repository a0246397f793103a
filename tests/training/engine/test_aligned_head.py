"""A head whose vocabulary is widened for a GPU's products gives the loss and the gradients of its own rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor

from memconsole.plan.tasks.language import MASKED
from memconsole_torch.techniques.activations import fused_loss

VOCABULARY, HIDDEN, ROWS = 37, 16, 24


@pytest.mark.parametrize("trained", [(True, True), (True, False), (False, True)], ids=str)
@pytest.mark.parametrize("how", [fused_loss.whole, lambda *a, **k: fused_loss.chunked(*a, 8, **k)])
@pytest.mark.parametrize("cap", [None, 5.0])
def test_added_rows_change_neither_the_loss_nor_a_gradient(
    how: Callable[..., Tensor],
    trained: tuple[bool, bool],
    cap: float | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(2, ROWS // 2, HIDDEN), torch.randn(VOCABULARY, HIDDEN)
    targets = torch.randint(0, VOCABULARY, (2, ROWS // 2))
    targets[0, :5] = MASKED

    def found() -> list[Tensor | None]:
        x, w = (
            t.clone().requires_grad_(on) for t, on in zip((hidden, weight), trained, strict=True)
        )
        loss = how(x, w, targets, share=0.5, cap=cap)
        (3 * loss).backward()
        return [loss.detach(), x.grad, w.grad]

    plain = found()
    asked = []
    monkeypatch.setattr(fused_loss, "_padding_rows", lambda *which: asked.append(which) or 11)
    for one, other in zip(plain, found(), strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            torch.testing.assert_close(one, other)
    assert bool(asked) == (cap is None), "capped logits are not widened"


def test_the_vocabulary_is_widened_for_16_bits_on_a_gpu() -> None:
    assert fused_loss._padding_rows("cuda", torch.bfloat16, 50_257) == 47
    assert fused_loss._padding_rows("cuda", torch.float16, 50_304) == 0
    assert fused_loss._padding_rows("cuda", torch.float32, 50_257) == 0
    assert fused_loss._padding_rows("cpu", torch.bfloat16, 50_257) == 0
