"""Sampling with a key-value cache in torch gives what the whole forward pass gives, in few shapes."""

from __future__ import annotations

from functools import partial

import msgspec
import numpy as np
import pytest
import torch

from memconsole_torch.models.decoder import Decoder
from memconsole_torch.models.generate import CachedDecoder, choose, generate
from memconsole_torch.models.pretrained import load
from memconsole_trainer.engine import GREEDY, Sampling
from memconsole_trainer.weights.initialize import InitialWeights
from tests.training.harness.tiny_models import ARCHITECTURES, tokens


def decoder(kind: str) -> Decoder:
    architecture = msgspec.structs.replace(ARCHITECTURES[kind], initializer_range=0.3)
    weights = InitialWeights(architecture, 3)
    return load(architecture, partial(Decoder, architecture), weights, torch.device("cpu"))


@pytest.mark.parametrize("kind", sorted(ARCHITECTURES))
@torch.no_grad()
def test_each_token_has_the_logits_of_the_whole_row(kind: str) -> None:
    model = decoder(kind)
    row = [int(token) for token in tokens(1, 90)[0]]
    whole = model.logits(torch.tensor([row]))[0]
    cached = CachedDecoder(model, 90)
    torch.testing.assert_close(cached.logits(row[:70]), whole[69], rtol=1e-4, atol=1e-4)
    for place in range(70, 90):
        found = cached.logits(row[place : place + 1])
        torch.testing.assert_close(found, whole[place], rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_each_token_follows_a_row_of_its_own_length() -> None:
    """LongRoPE: 32 tokens are a short row, and 33 a long one."""
    model = decoder("phi4-mini")
    prompt = [int(token) for token in tokens(1, 28)[0]]
    row = list(prompt)
    while len(row) < 40:
        row.append(int(model.logits(torch.tensor([row]))[0, -1].argmax()))
    assert prompt + generate(model, prompt, 12, GREEDY) == row
    assert generate(model, prompt, 4, GREEDY) == row[28:32]
    assert generate(model, row[:33], 3, GREEDY) == row[33:36]


def test_rows_are_read_in_few_lengths() -> None:
    model, seen = decoder("llama"), set()
    model.layers[0].mlp.register_forward_pre_hook(lambda _, x: seen.add(x[0].shape[1]))
    for length in (1, 3, 64, 65):
        generate(model, [1] * length, 70, GREEDY)
    assert seen == {1, 64, 128}


def test_a_sample_ends_with_the_first_stop_and_is_heard_as_it_comes() -> None:
    model = decoder("gpt2")
    free = generate(model, [1, 2], 20, GREEDY)
    assert len(free) == 20
    place = next(i for i, token in enumerate(free) if token not in free[:i] and i > 2)
    stops = {free[place], free[-1]} - set(free[:place])
    heard: list[list[int]] = []
    found = generate(model, [1, 2], 20, Sampling(stop=stops), heard.append)
    assert found == free[: place + 1]
    assert heard == [[token] for token in found]


def test_learned_positions_hold_the_end_of_a_prompt() -> None:
    model = decoder("gpt2")
    long = [int(token) for token in tokens(1, 300)[0]]
    assert generate(model, long, 8, GREEDY) == generate(model, long[-120:], 8, GREEDY)
    with pytest.raises(ValueError, match="128 tokens, but the model has 128 positions"):
        generate(model, [1], 128, GREEDY)


def test_rotary_positions_have_no_end() -> None:
    assert len(generate(decoder("llama"), [1], 140, GREEDY)) == 140


def test_the_nucleus_holds_the_fewest_tokens_that_are_likely_together() -> None:
    random = np.random.default_rng(0)
    scores = np.log(np.array([0.1, 0.2, 0.3, 0.4], np.float32))
    for top_p, kept in ((0.3, {3}), (0.5, {2, 3}), (0.75, {1, 2, 3}), (1.0, {0, 1, 2, 3})):
        assert {choose(scores, Sampling(1.0, 0, top_p), random) for _ in range(200)} == kept
    assert {choose(scores, Sampling(1.0, 2, 0.6), random) for _ in range(200)} == {2, 3}
    assert {choose(scores, Sampling(1.0, 2, 0.5), random) for _ in range(200)} == {3}
