"""Sized models hit their target with a sane shape, or say which vocabulary would."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memconsole.memory.state.sizes import sizes
from memconsole.plan.models import sizing
from memconsole.plan.models.architecture import Architecture
from memconsole.plan.models.sizing import default_vocab_size, size
from memconsole.plan.plan import PlanError

targets = st.floats(math.log(500_000), math.log(1_000_000_000)).map(lambda x: round(math.exp(x)))
vocabularies = st.one_of(
    st.none(), st.sampled_from([257, 512, 2048, 4096, 10_000, 32_000, 50_257, 128_256, 262_144])
)


def assert_sane(a: Architecture, target: int, vocab_size: int) -> None:
    assert abs(sizes(a).total - target) <= 0.02 * target
    assert a.vocab_size == vocab_size
    assert 32 <= a.hidden_size / a.layers <= 128
    assert 32 <= a.head_size <= 128
    assert a.head_size % 2 == 0
    assert a.heads * a.head_size == a.hidden_size
    assert a.heads % a.kv_heads == 0
    assert 1 <= a.intermediate_size / a.hidden_size <= 8
    if vocab_size * a.hidden_size > 0.1 * target:
        assert a.tied_embeddings


@given(targets, vocabularies)
def test_a_size_is_within_two_percent_and_sane_or_names_a_vocabulary(
    target: int, vocab_size: int | None
) -> None:
    entries = vocab_size or default_vocab_size(target)
    try:
        assert_sane(size(target, entries, 2048), target, entries)
    except PlanError as error:
        assert vocab_size is not None, "the default vocabulary always fits"
        found = re.search(r"a vocabulary of ([\d,]+) or less fits", str(error))
        assert found
        smaller = int(found[1].replace(",", ""))
        assert smaller < entries
        assert_sane(size(target, smaller, 2048), target, smaller)


@pytest.mark.parametrize(
    ("target", "vocab_size"),
    [(1_000_000, 10_000), (5_000_000, 32_000), (500_000, 4_096), (10_000_000, 50_257)],
)
def test_a_dominating_vocabulary_shrinks_the_width_and_ties_the_embedding(
    target: int, vocab_size: int
) -> None:
    shape = size(target, vocab_size, 2048)
    assert_sane(shape, target, vocab_size)
    assert shape.tied_embeddings
    assert shape.vocab_size * shape.hidden_size > target / 3


def test_the_seed_search_degenerates_where_this_one_does_not() -> None:
    # model_sizing.find_optimal_config gave 5 M a width of 64 and 89 layers.
    shape = size(5_000_000, 10_000, 2048)
    assert shape.layers < 16
    assert shape.hidden_size > 128


def test_large_models_have_their_own_output_matrix() -> None:
    shape = size(1_000_000_000, 32_000, 2048)
    assert not shape.tied_embeddings
    assert shape.hidden_size % 64 == 0


def test_an_impossible_vocabulary_is_one_line_naming_the_key() -> None:
    with pytest.raises(PlanError) as error:
        size(500_000, 262_144, 2048)
    assert error.value.key == "model.target_params"
    assert "262,144" in str(error.value)
    assert "\n" not in str(error.value)


@given(targets)
def test_the_default_vocabulary_grows_with_the_model(target: int) -> None:
    entries = default_vocab_size(target)
    assert 1024 <= entries <= 32_000
    assert entries <= default_vocab_size(2 * target)


def test_default_vocabularies_at_known_sizes() -> None:
    assert default_vocab_size(1_000_000) == 4096
    assert default_vocab_size(100_000_000) == 32_000


def test_a_repeated_size_is_not_searched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    size(7_654_321, 4096, 2048)

    def search(*_: int) -> None:
        raise AssertionError("searched again")

    monkeypatch.setattr(sizing, "_shapes", search)
    assert sizes(size(7_654_321, 4096, 2048)).total == pytest.approx(7_654_321, rel=0.02)
