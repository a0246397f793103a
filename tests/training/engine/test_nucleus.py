"""Both backends draw from the nucleus: the fewest tokens whose shares add up to `top_p`, each by its share."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from memconsole_trainer.engine import Sampling

TEMPERATURE = 0.8
DRAWS = 6000
LOGITS = np.random.default_rng(4).normal(0.0, 2.0, 40).astype(np.float32)


def nucleus(top_k: int, top_p: float) -> dict[int, float]:
    """Token → share, in float64 (Holtzman et al. 2020, §3.1): tokens are taken, the likeliest first, until their shares
    reach `top_p`."""
    scores = LOGITS.astype(np.float64) / TEMPERATURE
    shares = dict(enumerate(np.exp(scores) / np.exp(scores).sum()))
    falling = sorted(shares, key=lambda token: -shares[token])[: top_k or None]
    whole = sum(shares[token] for token in falling)
    found: dict[int, float] = {}
    for token in falling:
        if sum(found.values()) >= top_p * whole:
            break
        found[token] = shares[token]
    together = sum(found.values())
    return {token: share / together for token, share in found.items()}


def with_torch(top_k: int, top_p: float) -> NDArray[np.int64]:
    generate = pytest.importorskip("memconsole_torch.models.generate")
    random = np.random.Generator(np.random.Philox(1))
    drawn = [
        generate.choose(LOGITS, Sampling(TEMPERATURE, top_k, top_p), random) for _ in range(DRAWS)
    ]
    return np.array(drawn)


def with_jax(top_k: int, top_p: float) -> NDArray[np.int64]:
    jax = pytest.importorskip("jax")
    from memconsole_jax.tasks import sampling

    def drawn(key: object) -> object:
        return sampling.choose(jax.numpy.asarray(LOGITS), TEMPERATURE, top_k, top_p, key)

    return np.asarray(jax.jit(jax.vmap(drawn))(jax.random.split(jax.random.key(1), DRAWS)))


@pytest.mark.parametrize("draw", [with_torch, with_jax])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 0.9), (0, 0.5), (6, 0.9), (0, 1.0)])
def test_tokens_come_from_the_nucleus_alone_and_each_as_often_as_its_share(
    draw: Callable[[int, float], NDArray[np.int64]], top_k: int, top_p: float
) -> None:
    expected = nucleus(top_k, top_p)
    if top_p == 0.9:  # cuts some tokens off and leaves several, all likely enough to be drawn
        assert 2 < len(expected) < (top_k or len(LOGITS))
        assert min(expected.values()) * DRAWS >= 20
    counts = np.bincount(draw(top_k, top_p), minlength=len(LOGITS))
    shares = np.array([expected.get(token, 0.0) for token in range(len(LOGITS))])
    assert not counts[shares == 0.0].any()
    often = DRAWS * shares
    assert counts[often >= 20].all()
    np.testing.assert_array_less(np.abs(counts - often), 5 * np.sqrt(often) + 1)
