"""Gradients of tables in 16 bits are added up in fp32, so that later terms of a frequent row are not rounded away."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch import nn

from memconsole_torch.techniques.weights.rounding import widen_lookups


@pytest.mark.parametrize("name", ["embedding", "positions"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_frequent_rows_gradient_is_the_sum_of_all_its_terms(
    name: str, dtype: torch.dtype
) -> None:
    module = nn.Module()
    table = nn.Embedding(4, 8, dtype=dtype)
    setattr(module, name, table)
    widen_lookups(module)
    terms = 3000  # in bf16 a sum of ones ends at 256
    tokens = torch.zeros(terms, dtype=torch.int64)
    tokens[:3] = torch.arange(1, 4)
    found = table(tokens)
    assert found.dtype == torch.float32
    found.sum().backward()
    assert table.weight.grad is not None
    wanted = torch.tensor([terms - 3.0, 1, 1, 1])[:, None].expand(4, 8)
    torch.testing.assert_close(table.weight.grad.float(), wanted, rtol=0.005, atol=0)
