"""The list of weights: its names, its count, and that layers are alike."""

from __future__ import annotations

import math

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from memconsole.memory.state.sizes import sizes
from memconsole.plan import catalog
from memconsole.plan.models.architecture import Architecture, parameters

flags = st.booleans()


@st.composite
def architectures(draw: st.DrawFn) -> Architecture:
    kv_heads = draw(st.integers(1, 3))
    return Architecture(
        family=draw(st.sampled_from(["gpt2", "gpt_neox", "llama", "gemma", "gemma3"])),
        vocab_size=draw(st.integers(257, 999)),
        hidden_size=draw(st.integers(8, 64)),
        layers=draw(st.integers(1, 5)),
        heads=kv_heads * draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        head_size=draw(st.integers(2, 16)),
        intermediate_size=draw(st.integers(1, 64)),
        max_positions=draw(st.integers(8, 99)),
        positions=draw(st.sampled_from(["learned", "rope"])),
        biases=draw(flags),
        gated_mlp=draw(flags),
        tied_embeddings=draw(flags),
        query_key_norm=draw(flags),
        joint_query_key_norm=draw(flags),
        pre_norms=draw(flags),
        post_norms=draw(flags),
        parallel_residual=draw(flags),
        norm_unit_offset=draw(flags),
        auxiliary_rows=draw(st.integers(0, 9)),
        diagnostic_classes=draw(st.integers(0, 9)),
    )


def counted_by_hand(a: Architecture) -> int:
    """The sizes written out, independently of the list."""
    bias = int(a.biases)
    norm = a.hidden_size * (1 + bias)
    query, key = a.heads * a.head_size, a.kv_heads * a.head_size
    normed = query + key if a.joint_query_key_norm else 2 * a.head_size
    attention = (
        (a.hidden_size + bias) * (query + 2 * key)
        + (query + bias) * a.hidden_size
        + (normed if a.query_key_norm else 0)
    )
    into = 2 if a.gated_mlp else 1
    mlp = into * (a.hidden_size + bias) * a.intermediate_size
    mlp += (a.intermediate_size + bias) * a.hidden_size
    block = attention + mlp + norm * 2 * (a.pre_norms + a.post_norms)
    tables = a.vocab_size * (1 if a.tied_embeddings else 2) + a.auxiliary_rows
    tables += a.max_positions if a.positions == "learned" else 0
    head = a.diagnostic_classes * (a.hidden_size + 1)
    return tables * a.hidden_size + a.layers * block + norm + head


@given(architectures())
def test_the_count_is_the_sum_of_the_list_and_of_the_formula(a: Architecture) -> None:
    assert sizes(a).total == sum(p.size for p in parameters(a)) == counted_by_hand(a)


@given(architectures())
def test_names_are_unique_and_every_layer_has_the_same_weights(a: Architecture) -> None:
    weights = list(parameters(a))
    names = [p.name for p in weights]
    assert len(set(names)) == len(names)
    by_layer = {
        layer: [
            (p.name.removeprefix(f"layers.{layer}."), p.shape, p.role, p.std, p.fill)
            for p in weights
            if p.layer == layer
        ]
        for layer in range(a.layers)
    }
    assert all(rows == by_layer[0] for rows in by_layer.values())


@given(architectures())
def test_norms_and_biases_do_not_decay_and_start_constant(a: Architecture) -> None:
    for p in parameters(a):
        if p.role in ("norm", "bias"):
            assert not p.decays
            assert p.std == 0
        else:
            assert p.decays
            assert p.std > 0
        if p.role == "norm" and p.name.endswith(".weight"):
            assert p.fill == (0.0 if a.norm_unit_offset else 1.0)


def test_residual_outputs_start_smaller_with_depth() -> None:
    entry = catalog.models()["gpt2"].architecture
    assert entry is not None
    small = {p.name: p.std for p in parameters(entry)}
    assert small["layers.0.attention.output.weight"] == 0.02 / math.sqrt(24)
    assert small["layers.11.mlp.down.weight"] == 0.02 / math.sqrt(24)
    assert small["layers.0.attention.query.weight"] == 0.02


def test_gearhead_keeps_its_untrained_tables_out_of_training() -> None:
    entry = catalog.models()["gearhead"].architecture
    assert entry is not None
    assert sizes(entry).total == 34_083_904
    assert sum(p.size for p in parameters(entry) if not p.used) == 3_864_640


def test_gemma_3_alternates_five_local_layers_and_one_global() -> None:
    entry = catalog.models()["gemma-3-1b"].architecture
    assert entry is not None
    assert [layer for layer in range(entry.layers) if not entry.is_local(layer)] == [5, 11, 17, 23]
    everywhere = msgspec.structs.replace(entry, sliding_window=None)
    assert not any(everywhere.is_local(layer) for layer in range(entry.layers))
