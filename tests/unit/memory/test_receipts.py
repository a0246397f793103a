"""Receipts of finished runs correct and narrow the estimates of their own setup, and of no other."""

from __future__ import annotations

import itertools
import math
import os
import random
import shutil
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import pytest

from memconsole.calibration import Receipts, calibrated_here
from memconsole.devices.budget import budget
from memconsole.memory.answers.receipts import (
    DECILE,
    NOISE,
    NOISE_HEAP,
    NOISE_RUNS,
    Machine,
    Measured,
    calibrated,
    posterior,
)
from memconsole.memory.estimate import estimate, table_of
from memconsole.memory.exact.sharpen import alike
from memconsole.memory.table import Estimate, MemoryTable, Tier
from memconsole.plan.plan import Plan, replace
from memconsole.runs.record.run_store import runs_root
from memconsole.start import check_launch, start

SLOW = pytest.mark.slow
HERE = Machine("this processor", {"torch": "2.13.0"})


def a_plan(**changes: Any) -> Plan:
    return replace(
        Plan(), {"device.name": "cpu", **{k.replace("__", "."): v for k, v in changes.items()}}
    )


HOST = budget(a_plan(), None)


def price(plan: Plan) -> MemoryTable:
    return table_of(plan, HOST)


def a_run(ratio: float, plan: Plan | None = None, **changes: Any) -> Measured:
    plan = plan or a_plan()
    known: dict[str, Any] = {
        "plan": plan, "device_name": HERE.device_name, "device_total_bytes": 2**34, "driver": None,
        "versions": HERE.versions, "peak_bytes": int(price(plan).peak_bytes * ratio),
    }  # fmt: skip
    return Measured(**(known | changes))


def with_runs(*runs: Measured) -> MemoryTable:
    return calibrated(price(a_plan()), a_plan(), HERE, runs, price)


def test_a_run_that_compiled_the_same_programs_leaves_them_to_the_next() -> None:
    here = Machine(HERE.device_name, {"jax": "0.10.2"})
    plan = a_plan(backend="jax")

    def after(**changes: Any) -> MemoryTable:
        before = a_run(1.0, a_plan(backend="jax", **changes), versions=here.versions)
        return calibrated(price(plan), plan, here, [before], price)

    first = price(plan).host
    assert after().host == first.compiled()
    assert after(train__seed=7).host_bytes == first.compiled().peak < first.peak
    for other in ({"train__batch_size": 3}, {"train__evaluation_batch_size": 5}):
        found = after(**other)
        assert found.tier == Tier.CALIBRATED
        assert found.host_bytes == first.peak


def test_an_estimate_moves_to_what_its_setup_measured_and_its_band_narrows_with_each_run() -> None:
    plain = price(a_plan())
    widths, distances = [], []
    for n in (1, 2, 4, 8):
        table = with_runs(*[a_run(1.08)] * n)
        assert table.tier == table.reserved_tier == Tier.CALIBRATED
        low, high = table.band_bytes
        assert low < table.device_bytes < high
        widths.append(high / low)
        distances.append(abs(table.peak_bytes / plain.peak_bytes - 1.08))
    assert widths == sorted(widths, reverse=True)
    assert distances == sorted(distances, reverse=True)
    assert widths[0] < plain.band_bytes[1] / plain.band_bytes[0]
    assert distances[-1] < 0.005


def test_without_runs_nothing_changes() -> None:
    assert with_runs() == price(a_plan())


@pytest.mark.parametrize(
    "stranger",
    [
        a_run(1.3, a_plan(optimize__heap="tight")),
        a_run(1.3, a_plan(backend="jax")),
        a_run(1.3, a_plan(model__target_params=2_000_000)),
        a_run(1.3, device_name="another processor"),
        a_run(1.3, versions={"torch": "2.12.0"}),
    ],
    ids=["heap", "backend", "model", "device", "version"],
)
def test_nothing_is_borrowed_from_another_setup(stranger: Measured) -> None:
    assert with_runs(stranger) == price(a_plan())
    assert with_runs(stranger, a_run(1.05)) == with_runs(a_run(1.05))


OTHERS = [
    {"optimize__gradient_checkpointing": "selective"},
    {"optimize__fused_loss": True},
    {"optimize__precision": "bf16"},
    {"optimize__optimizer": "lion"},
    {"optimize__accumulation_steps": 2},
]


@pytest.mark.parametrize("toggled", OTHERS, ids=str)
@pytest.mark.parametrize("ratio", [0.87, 1.15])
def test_switching_an_optimization_does_not_switch_the_correction_off(
    toggled: dict[str, Any], ratio: float
) -> None:
    plan, runs = a_plan(**toggled), [a_run(ratio), a_run(ratio)]
    plain, table = price(plan), calibrated(price(plan), plan, HERE, runs, price)
    factor = table.peak_bytes / plain.peak_bytes
    assert min(1, ratio) < factor < max(1, ratio)
    # The difference that the toggle makes keeps its sign.
    expected = plain.peak_bytes - price(a_plan()).peak_bytes
    assert (table.peak_bytes - with_runs(*runs).peak_bytes) * expected > 0
    own = calibrated(price(plan), plan, HERE, [a_run(1.0, plan), *runs], price)
    assert own == calibrated(price(plan), plan, HERE, [a_run(1.0, plan)], price)
    # Many such runs tell little more than one: they may all be off alike.
    many = calibrated(price(plan), plan, HERE, runs * 50, price)
    assert many.band_bytes[1] / many.band_bytes[0] > 0.8 * table.band_bytes[1] / table.band_bytes[0]


def test_a_traced_plan_of_a_gpu_is_not_corrected_by_runs_with_other_optimizations() -> None:
    device = msgspec.structs.replace(HOST, kind="gpu")
    plan = a_plan(optimize__fused_loss=True)
    table = table_of(plan, device)
    traced = msgspec.structs.replace(table, formula=table, tier=Tier.EXACT)
    runs = [a_run(1.3)]
    by_formula = calibrated(table, plan, HERE, runs, price)
    assert by_formula != table
    found = calibrated(traced, plan, HERE, runs, price)
    assert found == msgspec.structs.replace(traced, formula=by_formula)


def test_a_traced_plan_is_compared_with_one_that_is_not_by_corrected_formulas() -> None:
    runs, plan = [a_run(1.1)], a_plan(optimize__fused_loss=True)
    before = with_runs(*runs)
    table = price(plan)
    traced = msgspec.structs.replace(table, formula=table, tier=Tier.EXACT)
    now, then = alike(calibrated(traced, plan, HERE, runs, price), before)
    by_formula = calibrated(table, plan, HERE, runs, price)
    assert then == before
    assert now.peak_bytes - then.peak_bytes == by_formula.peak_bytes - before.peak_bytes


def test_the_further_away_a_run_is_in_size_the_less_it_tells() -> None:
    widths = []
    for length in (128, 512, 2048, 2**20):
        plan = a_plan(data__sequence_length=length)
        table = calibrated(price(plan), plan, HERE, [a_run(0.9)] * 4, price)
        low, high = table.band_bytes
        widths.append(high / low)
        factor = table.peak_bytes / price(plan).peak_bytes
    assert widths == sorted(widths)
    assert widths[-1] > 1.5 * widths[0]
    assert factor > 0.95


def test_another_batch_or_length_is_the_same_setup() -> None:
    larger = a_run(1.06, a_plan(train__batch_size=32, data__sequence_length=256))
    assert with_runs(larger).tier == Tier.CALIBRATED


def test_the_order_of_runs_does_not_matter() -> None:
    runs = [a_run(r) for r in (0.97, 1.02, 1.1, 1.05)]
    assert with_runs(*runs).band_bytes == with_runs(*reversed(runs)).band_bytes


def test_scattered_runs_keep_the_band_wide() -> None:
    steady = with_runs(*[a_run(r) for r in (1.05, 1.05, 1.05)])
    scattered = with_runs(*[a_run(r) for r in (0.9, 1.05, 1.2)])
    assert scattered.band_bytes[1] / scattered.band_bytes[0] > 1.1 * (
        steady.band_bytes[1] / steady.band_bytes[0]
    )


SCATTERED = {
    "torch": (148, (168, 189, 166, 161, 150, 183)),
    "jax": (116, (113, 121, 116, 176)),
}
"""What a plan was estimated to take on a CPU, and what runs of it took, in MiB (`optimize.heap = fast`)."""


def next_ones(mib: int, peaks: tuple[int, ...], known_noise: float) -> list[bool]:
    """Whether the next run lies in the band of those before, for every order of the runs."""
    found = []
    for order in itertools.permutations(math.log(peak / mib) for peak in peaks):
        for n in range(1, len(order)):
            factor, spread = posterior(list(order[:n]), 0.25, None, known_noise)
            found.append(abs(order[n] - math.log(factor)) < DECILE * spread)
    return found


@pytest.mark.parametrize("backend", SCATTERED)
def test_the_band_after_few_runs_is_as_wide_as_runs_of_one_setup_scatter(backend: str) -> None:
    mib, peaks = SCATTERED[backend]
    within = next_ones(mib, peaks, NOISE_HEAP)
    assert sum(within) / len(within) > 0.6
    fewer = next_ones(mib, peaks, NOISE)
    assert sum(within) > sum(fewer) + len(within) / 10
    factor, spread = posterior([math.log(peaks[0] / mib)], 0.25, None, NOISE_HEAP)
    low, high = (mib * factor * math.exp(sign * DECILE * spread) for sign in (-1, 1))
    assert high / low > 1.2, "one run tells nothing of the scatter"


def test_two_runs_that_agree_by_chance_narrow_little_and_many_narrow_much() -> None:
    spreads = [posterior([0.1] * n, 0.25, None, NOISE_HEAP)[1] for n in (1, 2, 16)]
    assert spreads[1] > 0.7 * spreads[0]
    assert spreads[2] < 0.5 * spreads[0]


def test_only_a_heap_that_keeps_memory_makes_runs_scatter() -> None:
    def width(heap: str) -> float:
        plan = a_plan(optimize__heap=heap)
        low, high = calibrated(price(plan), plan, HERE, [a_run(1.0, plan)], price).band_bytes
        return math.log(high / low) / (2 * DECILE)

    assert width("fast") > NOISE_HEAP
    assert NOISE < width("tight") < NOISE_HEAP


@pytest.mark.parametrize("runs", [1, 2, 4])
def test_the_band_holds_where_setups_scatter_more_or_less_than_is_known(runs: int) -> None:
    """Over setups whose factor and whose noise are drawn from their priors."""
    rng, prior, within, trials = random.Random(runs), 0.25, 0, 4000
    for _ in range(trials):
        true = rng.gauss(0, prior)
        noise = NOISE_HEAP * math.sqrt(NOISE_RUNS / rng.gammavariate(NOISE_RUNS / 2, 2))
        seen = [rng.gauss(true, noise) for _ in range(runs)]
        factor, spread = posterior(seen, prior, None, NOISE_HEAP)
        within += abs(rng.gauss(true, noise) - math.log(factor)) < DECILE * spread
    assert within / trials == pytest.approx(0.77, abs=0.05)


@pytest.mark.parametrize("runs", [1, 3, 10])
def test_four_of_five_next_runs_lie_within_the_band(runs: int) -> None:
    """Over setups whose factor is drawn from the prior, and runs that scatter about it by the noise."""
    rng, prior, within, trials = random.Random(runs), 0.08, 0, 4000
    for _ in range(trials):
        true = rng.gauss(0, prior)
        seen = [rng.gauss(true, 0.02) for _ in range(runs)]
        factor, spread = posterior(seen, prior)
        within += abs(rng.gauss(true, 0.02) - math.log(factor)) < DECILE * spread
    assert within / trials == pytest.approx(0.8, abs=0.04)


@pytest.mark.parametrize(
    ("runs", "capacity"),
    [
        pytest.param(runs, capacity, marks=() if (runs, capacity) == (3, -0.05) else SLOW)
        for runs in (1, 3, 8)
        for capacity in (-0.05, 0.0, 0.06)
    ],
)
def test_coverage_stays_where_some_runs_only_bound_their_peak(runs: int, capacity: float) -> None:
    """As above, on a device of so much room: a run that needs more dies there."""
    rng, prior, within, trials, died = random.Random(runs), 0.08, 0, 1500, 0
    for _ in range(trials):
        true = rng.gauss(0, prior)
        needs = [rng.gauss(true, NOISE) for _ in range(runs)]
        seen = [n for n in needs if n <= capacity]
        bounds = [capacity] * (runs - len(seen))
        died += len(bounds)
        factor, spread = posterior(seen, prior, bounds)
        within += abs(rng.gauss(true, NOISE) - math.log(factor)) < DECILE * spread
    assert died > 0.1 * runs * trials, "the limit must matter"
    assert within / trials == pytest.approx(0.8, abs=0.06)


def test_a_run_that_died_below_the_estimate_says_little_and_one_above_raises_it() -> None:
    plain = price(a_plan()).peak_bytes
    below = with_runs(a_run(0.5, at_least=True))
    assert below.peak_bytes == pytest.approx(plain, rel=0.01)
    above = with_runs(a_run(1.3, at_least=True))
    assert above.peak_bytes > 1.2 * plain
    assert above.band_bytes[1] > 1.3 * plain
    assert above.band_from == "1 out-of-memory run of this setup"


def test_a_bound_moves_what_runs_measured_less_than_a_measurement_would() -> None:
    measured = with_runs(*[a_run(1.05)] * 3)
    bounded = with_runs(*[a_run(1.05)] * 3, a_run(1.07, at_least=True))
    told = with_runs(*[a_run(1.05)] * 3, a_run(1.30))
    assert measured.peak_bytes < bounded.peak_bytes < told.peak_bytes
    assert bounded.band_from == "3 measured runs and 1 that ran out of memory of this setup"


def test_a_far_bound_is_reckoned_with() -> None:
    factor, spread = posterior([0.0] * 5, 0.05, [2.0])
    assert math.isfinite(factor)
    assert math.isfinite(spread)
    assert factor > 1.05


def test_receipts_are_read_from_the_folder_of_runs_and_damaged_ones_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = a_plan()
    found = estimate(plan, HOST)
    name = found.table.budget.name
    measured = int(found.table.peak_bytes * 1.07)

    def leave(folder: str, content: bytes) -> None:
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "receipt.json").write_bytes(content)

    def receipt(**changes: Any) -> bytes:
        known = {
            "device_name": name, "versions": {"torch": "1"}, "plan": msgspec.to_builtins(plan),
            "steps": 12, "measured": {"peak_bytes": measured},
        }  # fmt: skip
        return msgspec.json.encode(known | changes)

    monkeypatch.setattr(
        "memconsole.calibration.version", lambda package: "1" if package == "torch" else "2"
    )
    (tmp_path / "still-training").mkdir()
    leave("damaged", b"{")
    leave("of-no-step", receipt(steps=0, measured={"peak_bytes": 5 * measured}))
    leave("of-a-damaged-log", receipt(missing_records=1, measured={"peak_bytes": measured // 2}))
    leave("unknown-key", receipt(plan={"model": {"nonsense": 1}}))
    receipts = Receipts(tmp_path)
    receipts.refresh()
    assert receipts.calibrate(plan, found) == found
    sampled = {"train": measured, "sample": 3 * measured}  # no estimate covers the sample
    leave("done", receipt(by_phase=sampled, measured={"peak_bytes": 3 * measured}))
    leave("dead", receipt(steps=0, shortfall={"needed_bytes": measured // 2}, measured={}))
    again = Receipts(tmp_path)
    again.refresh()
    table = again.calibrate(plan, found).table
    assert table.tier == Tier.CALIBRATED
    assert abs(table.peak_bytes - measured) < abs(found.table.peak_bytes - measured) / 4
    assert "1 measured run and 1 that ran out of memory" in table.band_from


def test_a_deleted_receipt_counts_no_more_and_a_rewritten_one_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memconsole.calibration.REFRESH_SECONDS", 0.0)
    plan = a_plan()
    found = estimate(plan, HOST)
    receipts = Receipts(tmp_path)

    def leave(run: str, ratio: float) -> None:
        receipt = {
            "device_name": HOST.name, "versions": {"torch": version("torch")},
            "plan": msgspec.to_builtins(plan), "steps": 12, "tokens_per_second": 100.0 / ratio,
            "measured": {"peak_bytes": int(found.table.peak_bytes * ratio)},
        }  # fmt: skip
        path = tmp_path / run / "receipt.json"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(msgspec.json.encode(receipt))
        os.utime(path, ns=(0, int(ratio * 1000)))

    def shown() -> Estimate:
        receipts.refresh()
        return receipts.calibrate(plan, found)

    leave("a", 1.2)
    of_one = shown()
    leave("b", 2.0)
    of_two = shown()
    assert of_two.table.peak_bytes > of_one.table.peak_bytes
    assert of_two.step_seconds > of_one.step_seconds
    shutil.rmtree(tmp_path / "b")
    assert shown() == of_one
    leave("a", 1.5)
    assert shown().table.peak_bytes > of_one.table.peak_bytes
    shutil.rmtree(tmp_path / "a")
    assert shown() == found


def test_a_launched_run_keeps_the_calibrated_estimate_that_was_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(
        "memconsole.start.launch", lambda plan, name, *, estimate, by_recipe, after: estimate
    )
    plan = a_plan()
    plain = check_launch(plan, None)
    folder = runs_root() / "done"
    folder.mkdir(parents=True)
    machine = plain.table.budget.name
    receipt = {
        "device_name": machine, "versions": {"torch": version("torch")},
        "plan": msgspec.to_builtins(plan), "steps": 12,
        "measured": {"peak_bytes": int(plain.table.peak_bytes * 1.3)},
    }  # fmt: skip
    (folder / "receipt.json").write_bytes(msgspec.json.encode(receipt))
    kept = msgspec.json.decode(start(plan, None, None), type=Estimate)
    shown = calibrated_here(plan, plain).table
    assert (kept.table.peak_bytes, kept.table.band_bytes) == (shown.peak_bytes, shown.band_bytes)
    assert kept.table.tier == Tier.CALIBRATED
    assert kept.table.peak_bytes > plain.table.peak_bytes
