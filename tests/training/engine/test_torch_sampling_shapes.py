"""Sampling asks for few shapes: each new one of a 16-bit product is a kernel that oneDNN keeps."""

from __future__ import annotations

import torch

from memconsole_torch.models import generate


class Lengths(torch.nn.Module):
    """A decoder of constant output that notes the lengths of its rows."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(8, 4)
        self.head_weight = self.embedding.weight
        self.seen: set[int] = set()

    def forward(self, row: torch.Tensor) -> torch.Tensor:
        self.seen.add(row.shape[1])
        return self.embedding(row)


def test_rows_grow_in_few_lengths() -> None:
    decoder = Lengths()
    found = generate.generate(
        decoder,  # type: ignore[arg-type]
        [1, 2],
        130,
        temperature=0.0,
        top_k=0,
        seed=0,
        context=100,
    )
    assert len(found) == 130
    assert decoder.seen == {64, 100}
