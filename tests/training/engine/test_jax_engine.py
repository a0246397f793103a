"""The JAX engine: one compiled step that updates in place, counts tokens right and resumes exactly."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import jax
import msgspec
import numpy as np
import pytest

from memconsole.plan.models.architecture import Architecture
from memconsole.plan.plan import Plan, PlanError, replace
from memconsole_jax import devices, engine
from memconsole_jax.compiled import compile_cache, compiling
from memconsole_jax.engine import JaxEngine
from memconsole_jax.layout.stacking import stacks
from memconsole_jax.tasks import sampling
from memconsole_trainer.data.text.rows.batches import language_batch
from memconsole_trainer.engine import GREEDY, Batch, Engine, Sampling
from memconsole_trainer.schedule import learning_rate
from memconsole_trainer.weights.initialize import InitialWeights
from tests.training.harness import jax_comparison as comparison
from tests.training.harness import tiny_models
from tests.training.harness.step_memory import step_memory

LENGTH, ROWS, STEPS = 12, 2, 20


def plan_with(**settings: Any) -> Plan:
    return replace(
        Plan(),
        {
            "backend": "jax",
            "device.name": "cpu",
            "data.sequence_length": LENGTH,
            "train.batch_size": ROWS,
            "train.warmup_steps": 2,
            "train.sample_tokens": 0,
            "train.learning_rate": 1e-2,
            **{key.replace("__", "."): value for key, value in settings.items()},
        },
    )


ARCHITECTURE: Architecture = msgspec.structs.replace(
    tiny_models.ARCHITECTURES["llama"], layers=2, auxiliary_rows=5
)


def built(plan: Plan, architecture: Architecture = ARCHITECTURE) -> JaxEngine:
    new = engine.create(plan, None)
    new.build(plan, architecture, STEPS, InitialWeights(architecture, 0))
    return new


@pytest.fixture(scope="module")
def accumulating() -> JaxEngine:
    """An engine of four micro-batches a step."""
    return built(plan_with(optimize__accumulation_steps=4))


class Checkpoint:
    """A `StateSource` in memory."""

    def __init__(self, source: Engine) -> None:
        self.tensors = dict(source.state())

    def names(self) -> list[str]:
        return list(self.tensors)

    def tensor(self, name: str) -> Any:
        return self.tensors[name]


def batch(step: int, micro_batches: int = 4) -> Batch:
    return tiny_models.batch(micro_batches, ROWS, LENGTH, seed=step, masked=0.3)


def test_accumulating_four_micro_batches_equals_one_large_batch(accumulating: JaxEngine) -> None:
    start = Checkpoint(accumulating)
    large = built(plan_with(train__batch_size=4 * ROWS))
    four = batch(0)
    # A ragged window: one micro-batch almost wholly masked.
    four["targets"][2, :, 1:] = -100
    whole = language_batch(
        *(x.reshape(1, 4 * ROWS, LENGTH) for x in (four["inputs"], four["targets"]))
    )
    for _ in range(3):
        accumulating.train_step(four)
        large.train_step(whole)
    few, many = accumulating.take_metrics(), large.take_metrics()
    for one, other in zip(few, many, strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-6)
        assert one.gradient_norm == pytest.approx(other.gradient_norm, rel=1e-5)
    found, expected = Checkpoint(accumulating).tensors, Checkpoint(large).tensors
    for name in found:
        np.testing.assert_allclose(found[name], expected[name], atol=1e-4, err_msg=name)
    accumulating.load_state(start)


def test_resuming_continues_bit_for_bit_and_reports_every_step(accumulating: JaxEngine) -> None:
    accumulating.train_step(batch(100))
    accumulating.take_metrics()
    middle = Checkpoint(accumulating)
    first = int(middle.tensor("optimizer.step"))
    for step in range(3):
        accumulating.train_step(batch(step))
    expected = accumulating.take_metrics()
    end = Checkpoint(accumulating).tensors
    plan = plan_with(optimize__accumulation_steps=4)
    assert [m.step for m in expected] == [first + 1, first + 2, first + 3]
    assert [m.learning_rate for m in expected] == [
        learning_rate(first + i, plan, STEPS) for i in range(3)
    ]
    accumulating.load_state(middle)
    for step in range(3):
        accumulating.train_step(batch(step))
    assert accumulating.take_metrics() == expected
    assert accumulating.take_metrics() == []
    again = Checkpoint(accumulating).tensors
    assert list(again) == list(end)
    for name, tensor in end.items():
        np.testing.assert_array_equal(again[name], tensor, err_msg=name)


def test_a_checkpoint_is_not_changed_by_later_steps(accumulating: JaxEngine) -> None:
    tensors = Checkpoint(accumulating).tensors
    copies = {name: tensor.copy() for name, tensor in tensors.items()}
    accumulating.train_step(batch(0))
    accumulating.synchronize()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(tensor, copies[name], err_msg=name)


def test_the_step_updates_weights_and_optimizer_state_in_place(accumulating: JaxEngine) -> None:
    Checkpoint(accumulating)  # reading the state out must not keep its memory from being reused
    before = jax.tree.leaves(accumulating._train_state)
    pointers = {x.unsafe_buffer_pointer() for x in before if x.size > 1}
    accumulating.train_step(batch(0))
    accumulating.synchronize()
    assert all(x.is_deleted() for x in before)
    after = jax.tree.leaves(accumulating._train_state)
    assert {x.unsafe_buffer_pointer() for x in after if x.size > 1} == pointers
    memory = step_memory(accumulating)
    state = sum(x.nbytes for x in after)
    assert state <= memory.alias_size_in_bytes <= state + 4096


@pytest.mark.parametrize("how", ["loaded", "released"])
def test_the_first_step_after_the_state_came_from_the_host_is_in_place_too(
    accumulating: JaxEngine, how: str
) -> None:
    """XLA may use memory of NumPy itself, and cannot give that to the results of a step."""
    if how == "loaded":
        tensors = {name: tensor.copy() for name, tensor in accumulating.state()}
        source = Checkpoint(accumulating)
        source.tensors = tensors
        accumulating.load_state(source)
    else:
        for part in ("weights", "optimizer"):
            accumulating.release(part)
            accumulating.restore(part)
    before = jax.tree.leaves(accumulating._train_state)
    pointers = {x.unsafe_buffer_pointer() for x in before if x.size > 1}
    accumulating.train_step(batch(0))
    accumulating.synchronize()
    after = jax.tree.leaves(accumulating._train_state)
    assert {x.unsafe_buffer_pointer() for x in after if x.size > 1} == pointers


def test_every_step_runs_the_one_compiled_program(accumulating: JaxEngine) -> None:
    accumulating.train_step(batch(0))
    accumulating.evaluate([batch(0)])
    compiled = []

    def count(event: str, *_: Any, **__: Any) -> None:
        if "backend_compile" in event:
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(count)
    try:
        for step in range(3):
            accumulating.train_step(batch(step))
        ragged = batch(4, micro_batches=3)
        accumulating.train_step(language_batch(ragged["inputs"][:, :1], ragged["targets"][:, :1]))
        accumulating.evaluate(
            [batch(0), language_batch(ragged["inputs"][:, :1], ragged["targets"][:, :1])]
        )
        accumulating.take_metrics()
        assert not compiled
        jax.jit(lambda x: x * 3 + 1)(np.arange(5))
        assert compiled  # the listener does hear compilations
    finally:
        jax.monitoring.unregister_event_duration_listener(count)


def test_what_is_prepared_beside_the_data_is_built_without_compiling_again() -> None:
    plan = plan_with(optimize__accumulation_steps=4)
    alone = built(plan)
    new = engine.create(plan, None)
    new.prepare(plan, ARCHITECTURE)
    assert new._compiling is not None
    begun = new._compiling.result(timeout=300)
    new.build(plan, ARCHITECTURE, STEPS, InitialWeights(ARCHITECTURE, 0))
    assert new._train_step is begun.train_step
    for made in (alone, new):
        made.train_step(batch(0))
        made.evaluate([batch(0)])
    assert alone.take_metrics() == new.take_metrics()


def test_a_program_that_cannot_be_compiled_fails_the_build_and_not_the_data(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(programs: Any, lowered: Any) -> Any:
        raise MemoryError("compiling")

    monkeypatch.setattr(compiling.Programs, "compiled_step", fails)
    new = engine.create(plan_with(), None)
    new.prepare(plan_with(), ARCHITECTURE)
    with pytest.raises(MemoryError, match="compiling"):
        new.build(plan_with(), ARCHITECTURE, STEPS, InitialWeights(ARCHITECTURE, 0))


def test_evaluation_sums_over_unmasked_targets_whatever_the_shape(accumulating: JaxEngine) -> None:
    parts = [batch(7), batch(8, micro_batches=1)]
    short = batch(9, micro_batches=1)
    parts.append(language_batch(short["inputs"][:, :1], short["targets"][:, :1]))
    found = accumulating.evaluate(parts)
    source = Checkpoint(accumulating).tensors

    class Weights:
        def tensor(self, name: str) -> Any:
            return source[f"model.{name}"]

    nats, tokens = 0.0, 0
    for part in parts:
        rows, targets = (x.reshape(-1, LENGTH) for x in (part["inputs"], part["targets"]))
        logits = comparison.logits(ARCHITECTURE, Weights(), rows).astype(np.float64)
        logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        kept = targets >= 0
        nats -= np.take_along_axis(logs, targets.clip(0)[..., None], -1)[..., 0][kept].sum()
        tokens += int(kept.sum())
    assert found.weight == tokens
    assert found.loss == pytest.approx(nats, rel=1e-6)


def test_what_no_loss_reaches_is_kept_and_saved_but_never_trained(accumulating: JaxEngine) -> None:
    start = InitialWeights(ARCHITECTURE, 0).tensor("auxiliary.weight")
    accumulating.train_step(batch(0))
    tensors = Checkpoint(accumulating).tensors
    np.testing.assert_array_equal(tensors["model.auxiliary.weight"], start)
    assert not [n for n in tensors if n.startswith("optimizer.") and "auxiliary" in n]
    assert accumulating.parameters - accumulating.trainable_parameters == start.size


def scores_of(engine: JaxEngine, prompt: list[int], found: list[int]) -> Any:
    """The logits (tokens, V) that a whole forward pass gives for each token that was sampled."""
    source = Checkpoint(engine).tensors

    class Weights:
        def tensor(self, name: str) -> Any:
            return source[f"model.{name}"]

    row = np.array([prompt + found], np.int32)
    return comparison.logits(ARCHITECTURE, Weights(), row)[0][len(prompt) - 1 : -1]


def test_greedy_sampling_takes_the_likeliest_token_of_the_whole_forward_pass(
    accumulating: JaxEngine,
) -> None:
    prompt = [5, 17, 60]
    found = accumulating.generate(prompt, 9)
    assert found == [int(i) for i in scores_of(accumulating, prompt, found).argmax(-1)]


def test_sampling_repeats_with_its_seed_and_stays_within_top_k(accumulating: JaxEngine) -> None:
    def sample(seed: int, top_k: int) -> list[int]:
        return accumulating.generate([1, 2], 12, Sampling(1.5, top_k, seed=seed))

    assert sample(3, 0) == sample(3, 0) != sample(4, 0)
    greedy = accumulating.generate([1, 2], 12)
    assert sample(3, 1) == greedy
    free = sample(3, 50)
    assert len(free) == 12

    last = next(i for i, token in enumerate(free) if i > 2 and token not in free[:i])
    stopping = Sampling(1.5, 50, seed=3, stop=(95, free[last]))
    stopped = accumulating.generate([1, 2], 12, stopping)
    assert stopped == free[: min(last, (*free, 95).index(95)) + 1]
    absent = [token for token in range(96) if token not in free]
    several = dataclasses.replace(stopping, stop=(*absent[:9], free[last]))
    assert accumulating.generate([1, 2], 12, several) == free[: last + 1]


def test_sampled_tokens_are_of_the_nucleus_of_the_whole_forward_pass(
    accumulating: JaxEngine,
) -> None:
    top_p = 0.9
    for seed in range(12):
        found = accumulating.generate([1, 2], 12, Sampling(1.0, top_p=top_p, seed=seed))
        assert len(found) == 12
        for scores, token in zip(scores_of(accumulating, [1, 2], found), found, strict=True):
            shares = np.exp(scores - scores.max())
            likelier = shares[shares > shares[token]].sum() / shares.sum()
            assert likelier < top_p + 1e-4


def test_local_layers_and_learned_positions_sample_as_they_train(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sampling, "PREFILL_TOKENS", 4)  # the prompt has several blocks
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    phi = tiny_models.ARCHITECTURES["phi4-mini"]
    assert phi.rope_scaling is not None
    scaling = msgspec.structs.replace(phi.rope_scaling, original_positions=12)  # LongRoPE
    short = msgspec.structs.replace(phi, rope_scaling=scaling, initializer_range=0.3)
    kinds = (
        tiny_models.ARCHITECTURES[kind]
        for kind in ("gemma3", "gpt2", "smollm3", "granite", "olmo2", "gpt_neox")
    )
    for architecture in (*kinds, short):
        weights = InitialWeights(architecture, 1)
        stacked = {
            n: jax.device_put(s.gather(weights.tensor), place)
            for n, s in stacks(architecture).items()
        }
        shapes = {
            n: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place) for n, x in stacked.items()
        }
        prompt = [int(token) for token in tiny_models.tokens(1, 9)[0]]
        sampler = sampling.TokenSampler(architecture, shapes, place)
        found = prompt + sampler(stacked, prompt, 7, GREEDY)
        assert len(found) == 16
        # Each token follows the row before it, of which 12 tokens are a short one.
        for first, last in ((9, 12), (13, 15)) if architecture is short else ((9, 15),):
            row = np.array([found[:last]], np.int32)
            logits = comparison.logits(architecture, weights, row)[0]
            assert found[first : last + 1] == list(logits[first - 1 :].argmax(-1))


def test_a_prompt_is_read_once_in_blocks_and_tokens_are_heard_as_they_come(
    accumulating: JaxEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, places = sampling._read, []

    def told(decoder: Any, tokens: Any, begin: Any, *rest: Any) -> Any:
        jax.debug.callback(lambda place: places.append(int(place)), begin, ordered=True)
        return read(decoder, tokens, begin, *rest)

    monkeypatch.setattr(sampling, "_read", told)
    monkeypatch.setattr(sampling, "PREFILL_TOKENS", 8)
    weights = accumulating._evaluation_weights | accumulating._frozen
    monkeypatch.setattr(sampling, "STREAMED_TOKENS", 2)
    place = accumulating._sampler._place
    sampler = sampling.TokenSampler(ARCHITECTURE, accumulating._sampler._weights, place)
    heard: list[list[int]] = []
    found = sampler(weights, [7] * 19, 5, GREEDY, heard.append)
    jax.effects_barrier()
    assert places == [0, 8, 16, 18, 19, 20, 21, 22]
    assert [len(part) for part in heard] == [2, 2, 1]
    assert [token for part in heard for token in part] == found
    assert found == accumulating.generate([7] * 19, 5)


def test_old_compilations_make_room_for_new_ones(tmp_path: Path) -> None:
    for age, name in enumerate(("new", "old", "oldest")):
        (tmp_path / name).write_bytes(bytes(100))
        os.utime(tmp_path / name, (1000 - age, 1000 - age))
    compile_cache._delete_oldest(tmp_path, 250)
    assert sorted(x.name for x in tmp_path.iterdir()) == ["new", "old"]


@pytest.mark.parametrize("name", ["cuda:0", "tpu", "mps", "rtx-3060-12gb"])
def test_a_device_this_machine_lacks_is_refused_by_name(name: str) -> None:
    if name == "cuda:0" and any(d.platform == "gpu" for d in jax.devices()):
        pytest.skip("there is a GPU")
    with pytest.raises(PlanError, match=name) as error:
        devices.find(plan_with(device__name=name))
    assert error.value.key == "device.name"
    assert "\n" not in str(error.value)


def test_platform_lines_say_what_is_on() -> None:
    plan = plan_with(
        optimize__precision="bf16",
        optimize__gradient_checkpointing="full",
        optimize__accumulation_steps=8,
    )
    lines = "\n".join(engine.create(plan, None).platform_lines())
    for words in (
        "Detected platform: CPU",
        "Mixed precision (bfloat16)",
        "(remat) enabled - keeps block inputs only",
        "8 steps",
    ):
        assert words in lines
    assert "remat" not in "\n".join(engine.create(plan_with(), None).platform_lines())
