"""What both backends start from: learning rates, initial weights, and how host memory is counted."""

from __future__ import annotations

import itertools
import math
import mmap
import subprocess
import sys
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memconsole.plan.models.architecture import Architecture, parameters
from memconsole.plan.models.sizing import size
from memconsole.plan.plan import Plan, replace
from memconsole_trainer.host.host_memory import HostMemory, tree_memory
from memconsole_trainer.schedule import learning_rate, warmup_steps
from memconsole_trainer.weights.initialize import InitialWeights


def with_schedule(schedule: str, warmup: int = 10, minimum: float = 0.1) -> Plan:
    return replace(
        Plan(),
        {
            "train.schedule": schedule,
            "train.warmup_steps": warmup,
            "train.learning_rate": 1e-3,
            "train.minimum_learning_rate": minimum,
        },
    )


def test_the_cosine_schedule_has_its_known_points() -> None:
    plan = with_schedule("cosine")
    assert learning_rate(0, plan, 111) == pytest.approx(1e-4)
    assert learning_rate(9, plan, 111) == pytest.approx(1e-3)
    assert learning_rate(10, plan, 111) == pytest.approx(1e-3)
    assert learning_rate(60, plan, 111) == pytest.approx(0.5 * (1e-3 + 1e-4))
    assert learning_rate(110, plan, 111) == pytest.approx(1e-4)
    assert learning_rate(10_000, plan, 111) == pytest.approx(1e-4)
    assert learning_rate(35, with_schedule("linear"), 111) == pytest.approx(1e-3 * (1 - 0.9 / 4))
    assert learning_rate(110, with_schedule("constant"), 111) == 1e-3


def test_a_warm_up_of_more_than_half_the_run_takes_a_tenth_of_it() -> None:
    plan = with_schedule("linear", warmup=100, minimum=0.0)
    assert [warmup_steps(plan, n) for n in (1, 9, 50, 101, 199, 200)] == [0, 0, 5, 10, 19, 100]
    rates = [learning_rate(step, plan, 50) for step in range(50)]
    assert rates.index(max(rates)) == 4
    assert rates[49] == 0
    assert learning_rate(99, plan, 200) == pytest.approx(1e-3)


def test_wsd_is_stable_until_its_last_share_of_the_steps_and_ends_at_the_minimum() -> None:
    plan = replace(with_schedule("wsd"), {"train.decay_share": 0.25})
    rates = [learning_rate(step, plan, 100) for step in range(100)]
    assert rates[9:75] == [1e-3] * 66
    assert rates[75] == pytest.approx(1e-4 + 9e-4 * (1 - math.sqrt(1 / 25)))
    assert rates[99] == pytest.approx(1e-4)
    assert all(a > b for a, b in itertools.pairwise(rates[74:]))
    assert learning_rate(5_000, plan, 100) == pytest.approx(1e-4)


def test_wsd_leaves_the_warm_up_alone_whatever_its_share() -> None:
    plan = replace(with_schedule("wsd", warmup=10), {"train.decay_share": 1.0})
    rates = [learning_rate(step, plan, 30) for step in range(30)]
    assert rates[:10] == pytest.approx([1e-4 * n for n in range(1, 11)])
    assert max(rates) == rates[9] == 1e-3
    assert rates[29] == pytest.approx(1e-4)
    one = replace(with_schedule("wsd", warmup=0), {"train.decay_share": 0.001})
    assert [learning_rate(step, one, 3) for step in range(3)] == pytest.approx([1e-3, 1e-3, 1e-4])


@given(
    st.sampled_from(["constant", "linear", "cosine", "wsd"]),
    st.integers(0, 50),
    st.integers(1, 120),
    st.floats(0, 1),
)
def test_every_schedule_rises_then_never_rises_again_and_stays_within_its_limits(
    schedule: str, warmup: int, total: int, minimum: float
) -> None:
    plan = with_schedule(schedule, warmup, minimum)
    rates = [learning_rate(step, plan, total) for step in range(total)]
    top = rates.index(max(rates))
    assert all(0 <= rate <= 1e-3 * (1 + 1e-12) for rate in rates)
    assert rates[0] > 0 or minimum == 0
    assert all(a <= b for a, b in itertools.pairwise(rates[: top + 1]))
    assert all(a >= b * (1 - 1e-12) for a, b in itertools.pairwise(rates[top:]))
    assert max(rates) == pytest.approx(1e-3, rel=1e-9) or total == 1


def tiny() -> Architecture:
    return size(300_000, 400, 64)


def test_initial_weights_have_the_spread_the_architecture_asks_for() -> None:
    weights = InitialWeights(tiny(), 3)
    for parameter in parameters(tiny()):
        tensor = weights.tensor(parameter.name)
        assert tensor.shape == parameter.shape
        assert tensor.dtype == np.float32
        if parameter.std == 0:
            assert (tensor == parameter.fill).all()
        else:
            assert tensor.std() == pytest.approx(parameter.std, rel=6 / math.sqrt(tensor.size))
            assert abs(tensor.mean()) < 6 * parameter.std / math.sqrt(tensor.size)


def test_a_tensor_depends_on_its_name_and_the_seed_alone() -> None:
    name, other = "layers.0.attention.query.weight", "layers.1.attention.query.weight"
    first = InitialWeights(tiny(), 3)
    first.tensor(other)
    again = InitialWeights(tiny(), 3)
    np.testing.assert_array_equal(first.tensor(name), again.tensor(name))
    assert not np.array_equal(first.tensor(name), first.tensor(other))
    assert not np.array_equal(first.tensor(name), InitialWeights(tiny(), 4).tensor(name))


MIB = 1 << 20


def test_growth_and_peak_follow_allocations_and_the_peak_can_begin_anew() -> None:
    memory = HostMemory()
    memory.start()
    held = np.ones(40 * MIB, dtype=np.uint8)
    assert memory.growth_bytes() == pytest.approx(40 * MIB, abs=2 * MIB)
    brief = np.ones(60 * MIB, dtype=np.uint8)
    del brief
    assert memory.growth_bytes() == pytest.approx(40 * MIB, abs=2 * MIB)
    assert memory.peak_bytes() == pytest.approx(100 * MIB, abs=3 * MIB)
    memory.reset_peak()
    assert memory.peak_bytes() == pytest.approx(40 * MIB, abs=2 * MIB)
    memory.close()
    del held


def test_a_peak_between_two_readings_is_found_and_mapped_files_are_not_counted(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    path = tmp_path_factory.mktemp("map") / "file"
    path.write_bytes(b"x" * (50 * MIB))
    memory = HostMemory(period_seconds=1000)
    memory.start()
    mapped = np.memmap(path, mode="r")
    assert int(mapped.sum()) > 0
    assert memory.peak_bytes() < 6 * MIB
    brief = np.ones(30 * MIB, dtype=np.uint8)
    del brief
    assert memory.peak_bytes() == pytest.approx(30 * MIB, abs=6 * MIB)
    memory.close()


def test_a_reading_costs_less_than_a_hundredth_of_the_time_between_two() -> None:
    memory = HostMemory(period_seconds=0.05)
    started = time.thread_time()
    for _ in range(100):
        memory.growth_bytes()
    assert (time.thread_time() - started) / 100 < 0.01 * 0.05


def test_children_count_into_the_tree() -> None:
    code = "import time; held = bytearray(80 << 20); print(1, flush=True); time.sleep(60)"
    before = tree_memory()
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    now = tree_memory()
    child.kill()
    child.communicate()
    assert now.resident - before.resident > 70 * MIB
    assert now.anonymous - before.anonymous > 70 * MIB


def test_shared_pages_are_told_apart_and_counted_once() -> None:
    before = tree_memory()
    with mmap.mmap(-1, 60 * MIB) as shared:
        shared.write(b"x" * (60 * MIB))
        now = tree_memory()
    assert now.shared - before.shared > 55 * MIB
    assert now.anonymous - before.anonymous < 30 * MIB


def test_the_watching_thread_ends_with_its_memory() -> None:
    memory = HostMemory(period_seconds=0.01)
    memory.start()
    thread = memory._thread
    assert thread is not None
    assert thread.is_alive()
    del memory
    thread.join(10)
    assert not thread.is_alive()
