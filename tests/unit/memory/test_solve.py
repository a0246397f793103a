"""The solver against brute force over the whole product of toggle values."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memconsole.devices.planned import catalog_budgets
from memconsole.memory.answers.advice import (
    LARGEST_BATCH,
    _least_beyond_batch,
    _least_beyond_length,
    largest_micro_batch,
    largest_sequence_length,
    remedies,
)
from memconsole.memory.answers.solve import (
    NOT_ALLOCATED,
    faster,
    fit,
    planned_on,
    smallest_device,
    smallest_device_fitted,
)
from memconsole.memory.answers.space import FREE, HARM
from memconsole.memory.estimate import model_of, table_of
from memconsole.memory.run_time import seconds_per_unit_of_run
from memconsole.memory.verdict import Verdict
from memconsole.plan import plan as plans
from memconsole.plan.machine.budget import Budget
from memconsole.plan.plan import Plan, PlanError
from memconsole.plan.toggles.optimization import Optimization, Reach, Result
from memconsole.plan.toggles.optimizations import BY_KEY, OPTIMIZATIONS, conflict

MANY = frozenset({"optimize.precision", "optimize.optimizer", "optimize.optimizer_offload"})
"""Pinned where the product of all toggles would take long and prove no more."""
PINNED = MANY - {"optimize.optimizer_offload"} | {
    "optimize.lora_rank",
    "optimize.activation_offload",
}
KINDS = {"torch": ("cpu", "gpu", "rocm", "apple"), "jax": ("cpu", "gpu", "rocm", "tpu")}
ALTERING = (
    "optimize.precision",
    "optimize.optimizer",
    "optimize.optimizer_offload",
    "optimize.base_storage",
    "optimize.lora_rank",
)


def device(kind: str, usable: int) -> Budget:
    return Budget(
        name=kind,
        kind=kind,
        memory_label="memory",
        total_bytes=max(usable, 1),
        usable_bytes=usable,
        why="test",
        bandwidth_bytes_per_second=1e12,
        peak_flops={"fp32": 2e13, "bf16": 1e14},
    )


@st.composite
def plans_and_kinds(draw: st.DrawFn) -> tuple[Plan, str]:
    """A small random plan of any toggles its backend trains with, and a kind of device."""
    backend = draw(st.sampled_from(["torch", "jax"]))
    plan = plans.replace(
        Plan(),
        {
            "backend": backend,
            "model.name": draw(st.sampled_from(["stories", "gpt2", "smollm2-135m", "gemma-3-1b"])),
            "data.sequence_length": draw(st.sampled_from([64, 200, 512])),
            "train.batch_size": draw(st.sampled_from([1, 2, 6, 10])),
            "train.evaluation_batch_size": draw(st.sampled_from([None, None, 12, 300])),
        },
    )
    for row in FREE:
        values = [v for v in row.values(plan) if row.refusal(plan, v) is None]
        tried = [row.apply(plan, value) for value in values]
        plan = draw(st.sampled_from([p for p in tried if conflict(p) is None]))
    return plan, draw(st.sampled_from(KINDS[backend]))


def few_toggles() -> st.SearchStrategy[frozenset[str]]:
    """All toggles but a few, to be pinned: their whole product is too large to try."""
    free = st.sets(st.sampled_from([r.key for r in FREE]), min_size=3, max_size=4)
    return free.map(lambda free: frozenset(r.key for r in FREE if r.key not in free))


def everywhere(plan: Plan, keep: frozenset[str], most: int) -> list[Plan]:
    """The plan alone and on each number of devices, with the same rows in a step and in equal micro-batches."""
    rows, found = plan.effective_batch, []
    for count in sorted(n for n in (1, 2, 4, 8, most) if n <= most):
        for sharding in ("none",) if count == 1 else ("ddp", "fsdp"):
            each = rows // count
            sizes = [n for n in range(1, plan.train.batch_size + 1) if each % n == 0]
            batch = max(sizes, default=1)
            changes = {"device.count": count, "optimize.sharding": sharding}
            if count != plan.device.count:
                changes |= {"train.batch_size": batch, "optimize.accumulation_steps": each // batch}
            kept = all(
                plans.get(plan, key) == value for key, value in changes.items() if key in keep
            )
            if rows % count == 0 and kept:
                found.append(plans.replace(plan, changes))
    return found or [plan]


def everything(
    plan: Plan, keep: frozenset[str], most: int = 1
) -> list[tuple[tuple[Any, ...], Plan]]:
    """Every plan that differs in place and free toggles, with what decides between them but for time."""
    return [
        ((number, changes + moved + (halved > 0), [n, *order, halved]), evaluated)
        for n, other in enumerate(everywhere(plan, keep, most))
        for moved in [
            (other.device.count != plan.device.count)
            + (other.optimize.sharding != plan.optimize.sharding)
        ]
        for (number, changes, order), found in _in_one_place(other, keep)
        for halved, evaluated in enumerate(evaluating(found))
    ]


def evaluating(plan: Plan) -> list[Plan]:
    """The plan, and with evaluation batches that are halved again and again, of which there are then more."""
    found, rows = [plan], plan.evaluation_batch
    while rows > 1:
        rows = max(n for n in range(1, rows // 2 + 1) if rows % n == 0)
        whole = plan.evaluation_batches(plan.train.evaluation_train_batches)
        batches = whole * plan.evaluation_batch // rows
        settings = {"train.evaluation_batch_size": rows, "train.evaluation_train_batches": batches}
        found.append(plans.replace(plan, settings))
    return found


def values_of(row: Optimization, plan: Plan) -> list[Any]:
    """Every value that the backend trains; for accumulation, every one that splits the rows equally."""
    rows = plan.train.batch_size * plan.optimize.accumulation_steps
    accumulates = row.key == "optimize.accumulation_steps"
    values = [n for n in range(1, rows + 1) if not rows % n] if accumulates else row.values(plan)
    return [value for value in values if row.refusal(plan, value) is None]


def _in_one_place(plan: Plan, keep: frozenset[str]) -> list[tuple[tuple[Any, ...], Plan]]:
    found = []
    trained = [
        [row.value(plan)]
        if row.key in keep or row.key == "optimize.sharding"
        else values_of(row, plan)
        for row in FREE
    ]
    offered = [values_of(row, plan) for row in FREE]
    for values in itertools.product(*trained):
        changed, chosen = plan, list(zip(FREE, values, strict=True))
        for row, value in chosen:
            if value != row.value(plan):
                changed = row.apply(changed, value)
        if conflict(changed):
            continue
        if any(plans.get(changed, key) != plans.get(plan, key) for key in keep):
            continue
        classes = {row.result_of(row.value(plan), value) for row, value in chosen}
        places = [values.index(value) for (_, value), values in zip(chosen, offered, strict=True)]
        found.append(
            (
                (
                    sum(2**n for n, result in enumerate(HARM) if result in classes),
                    sum(value != row.value(plan) for row, value in chosen),
                    [
                        p
                        for last in (False, True)
                        for (row, _), p in zip(chosen, places, strict=True)
                        if (row.reach is Reach.UPDATE) == last
                    ],
                ),
                changed,
            )
        )
    return found


def seconds(plan: Plan, budget: Budget) -> float:
    return float(f"{seconds_per_unit_of_run(plan, model_of(plan), budget):.9e}")


@settings(max_examples=12, deadline=None)
@given(
    plans_and_kinds(),
    st.floats(0, 1),
    few_toggles(),
    st.sets(st.sampled_from(HARM), max_size=2),
    st.sampled_from([1, 1, 2, 3, 4]),
)
def test_the_fit_is_what_trying_everything_finds(
    chosen: tuple[Plan, str], share: float, keep: frozenset[str], allow: set[Result], most: int
) -> None:
    plan, kind = chosen
    roomy = device(kind, 1 << 50)
    tried = [(key, p, table_of(p, roomy)) for key, p in everything(plan, keep, most)]
    sizes = sorted({t.device_bytes for *_, t in tried} | {t.at_most_bytes for *_, t in tried})
    usable = sizes[round(share * (len(sizes) - 1))]
    budget = device(kind, usable)
    free = sum(1 << HARM.index(result) for result in allow)

    def rank(c: tuple[tuple[Any, ...], Plan]) -> tuple[Any, ...]:
        return (c[0][0] & ~free, seconds(c[1], budget), *c[0][1:])

    sure = [(k, p) for k, p, t in tried if t.at_most_bytes <= usable]
    tight = [(k, p) for k, p, t in tried if t.device_bytes <= usable < t.at_most_bytes]
    (number, *_), best = min(sure or tight, key=rank)
    found = fit(plan, budget, keep, allow=frozenset(allow), devices=most)
    assert found.after.verdict is (Verdict.FITS if sure else Verdict.TIGHT)
    assert found.plan == best
    less = [c for c in tight if sure and rank(c)[0] < number & ~free]
    assert found.only_tight == (min(less, key=rank)[1] if less else None)
    assert found.after == table_of(best, budget)
    assert set(found.result_changes) == {
        result.value for n, result in enumerate(HARM) if number & 1 << n
    }
    assert set(found.allowed) == allow | {r for n, r in enumerate(HARM) if number & 1 << n}
    hopeless = fit(plan, device(kind, sizes[0] - 1), keep, devices=most)
    assert not hopeless.fits
    assert hopeless.after.device_bytes == sizes[0]


@settings(max_examples=30, deadline=None)
@given(plans_and_kinds(), st.integers(0, 1 << 33), few_toggles(), st.sampled_from([1, 4, 6]))
def test_a_fit_never_changes_the_rows_of_a_step_nor_anything_it_does_not_tell(
    chosen: tuple[Plan, str], usable: int, keep: frozenset[str], most: int
) -> None:
    plan, kind = chosen
    found = fit(plan, device(kind, usable), keep, devices=most)
    assert found.plan.effective_batch == plan.effective_batch
    assert found.plan.device.count <= most
    typed = {change.key: change.after for change in found.changes}
    if "optimize.lora_rank" in typed:  # with adapters the base is frozen whatever this says
        typed["optimize.freeze_base"] = found.plan.optimize.freeze_base
    assert plans.replace(plan, typed) == found.plan, "who types what is told gets the same plan"
    undone = found.plan
    moved = found.plan.device.count != plan.device.count
    for change in found.changes:
        # On other devices, the rows of a step are divided anew: accumulation is told apart from the micro-batch.
        if change.key in BY_KEY and not (moved and change.key == "optimize.accumulation_steps"):
            undone = BY_KEY[change.key].apply(undone, change.before)
        else:
            undone = plans.replace(undone, {change.key: change.before})
    assert undone == plan


def test_what_the_backend_does_not_train_is_given_up_unless_pinned() -> None:
    plan = plans.replace(Plan(), {"backend": "jax", "optimize.compile": True})
    budget = device("cpu", 1 << 40)
    assert not fit(plan, budget).plan.optimize.compile
    assert fit(plan, budget, frozenset({"optimize.compile"})).plan.optimize.compile


def test_a_pinned_micro_batch_pins_accumulation_with_it() -> None:
    plan = plans.replace(Plan(), {"train.batch_size": 64})
    tight = device("gpu", fit(plan, device("gpu", 1), MANY).after.device_bytes)
    assert fit(plan, tight, MANY).after.verdict is Verdict.TIGHT
    assert fit(plan, tight, MANY).plan.train.batch_size < 64
    assert fit(plan, tight, MANY | {"train.batch_size"}).plan.train.batch_size == 64


@pytest.mark.parametrize("batches", [0, 20])
def test_an_evaluation_batch_that_is_too_large_is_halved_and_nothing_else(batches: int) -> None:
    plan = plans.replace(
        Plan(),
        {
            "model.name": "smollm2-135m",
            "train.batch_size": 4,
            "train.evaluation_batch_size": 2048,
            "train.evaluation_batches": batches,
        },
    )
    halved = plans.replace(
        plan,
        {
            "train.evaluation_batch_size": 256,
            "train.evaluation_batches": 8 * batches,
            "train.evaluation_train_batches": 32,
        },
    )
    keep = frozenset(row.key for row in FREE)
    gpu = device("gpu", table_of(halved, device("gpu", 1)).at_most_bytes)
    found = fit(plan, gpu, keep)
    assert found.plan == halved
    assert found.result_changes == ()
    assert [change.after for change in found.changes] == [256, *([160] if batches else []), 32]
    for key in ("train.evaluation_batch_size", "train.evaluation_train_batches"):
        assert not fit(plan, gpu, keep | {key}).fits, f"{key} is pinned"


@pytest.mark.parametrize("rows", [7, 10, 1000])
def test_micro_batches_of_one_row_are_found_whatever_the_number_of_rows(rows: int) -> None:
    plan = plans.replace(
        Plan(),
        {"model.name": "smollm2-135m", "train.batch_size": rows, "data.sequence_length": 512},
    )
    split = {"train.batch_size": 1, "optimize.accumulation_steps": rows}
    alone = plans.replace(plan, split)
    keep = frozenset(row.key for row in FREE if row.key != "optimize.accumulation_steps")
    found = fit(plan, device("gpu", table_of(alone, device("gpu", 1)).at_most_bytes), keep)
    assert found.fits
    assert found.plan == alone
    assert found.result_changes == ()
    least = next(r for r in remedies(plan, device("gpu", 1)) if "train.batch_size" in r.changes)
    assert least.changes == split


def test_the_same_result_comes_before_a_faster_plan_with_another() -> None:
    plan = plans.replace(
        Plan(),
        {"model.name": "smollm2-135m", "data.sequence_length": 1024, "train.batch_size": 16},
    )
    found = fit(plan, device("gpu", 12 << 30))
    assert found.fits
    assert not found.before.fits
    assert found.result_changes == ()
    faster = plans.replace(found.plan, {"optimize.precision": "bf16"})
    assert seconds(faster, found.after.budget) < seconds(found.plan, found.after.budget)


LLAMA = plans.apply_settings(
    Plan(), ["model.name=llama-3.1-8b", "device.name=h100-80gb", "data.sequence_length=2048"]
)


def test_8b_on_one_h100_says_how_much_faster_other_results_are() -> None:
    """At the same result its optimizer state must leave the card; in 16 bits with 8-bit state all of it stays."""
    budget = catalog_budgets(LLAMA)["h100-80gb"]
    found = fit(LLAMA, budget)
    assert found.result_changes == ()
    assert found.plan.optimize.optimizer_offload == "pinned"
    more = faster(LLAMA, budget, found)
    assert more is not None
    assert more.results == (Result.ARITHMETIC, Result.STATE_8_BITS)
    assert more.plan.optimize.optimizer_offload == "none"
    assert table_of(more.plan, budget).verdict is Verdict.FITS
    assert more.speedup == pytest.approx(seconds(found.plan, budget) / seconds(more.plan, budget))
    allowed = fit(LLAMA, budget, allow=frozenset(more.results))
    assert allowed.plan == more.plan
    assert faster(LLAMA, budget, allowed) is None, "nothing more is to be had"


def test_a_short_run_does_not_wait_for_a_compiler_that_a_long_one_has_time_for() -> None:
    budget = device("gpu", 80 << 30)
    for steps, compiles in ((1000, False), (1_000_000, True)):
        plan = plans.replace(Plan(), {"train.max_steps": steps})
        assert fit(plan, budget).plan.optimize.compile is compiles


def test_the_smallest_device_is_one_for_the_same_result() -> None:
    names = ("l4", "a100-40gb", "h100-80gb", "h200")
    catalog = catalog_budgets(LLAMA)
    devices = {name: catalog[name] for name in names}
    same = smallest_device_fitted(LLAMA, devices)
    narrow = smallest_device_fitted(
        LLAMA, devices, allow=frozenset({Result.ARITHMETIC, Result.ADAPTERS})
    )
    assert same is not None
    assert narrow is not None
    assert devices[narrow].usable_bytes < devices[same].usable_bytes
    assert fit(planned_on(LLAMA, same), devices[same]).result_changes == ()


def test_an_impossible_plan_is_refused_and_a_hopeless_one_names_its_floor() -> None:
    with pytest.raises(PlanError, match="freeze_base"):
        fit(plans.replace(Plan(), {"optimize.freeze_base": True}), device("gpu", 1 << 40))
    large = plans.replace(Plan(), {"model.name": "llama-3.2-1b"})
    found = fit(large, device("gpu", 1 << 28), MANY)
    phase, component, size = found.floor
    assert phase == found.after.peak_phase
    assert size == max(c.at(phase) for c in found.after.components)
    assert component in {c.name for c in found.after.components}


def test_a_floor_that_the_driver_makes_is_not_explained_by_a_small_component() -> None:
    card = catalog_budgets(Plan())["rtx-4090"]
    found = fit(Plan(), msgspec.structs.replace(card, usable_bytes=1 << 29), MANY)
    _, component, size = found.floor
    assert component == NOT_ALLOCATED
    assert size == found.after.device_bytes - found.after.peak_bytes
    assert size > found.after.device_bytes // 2


@settings(max_examples=10, deadline=None)
@given(plans_and_kinds(), st.integers(1, 300), st.sampled_from([0, 1]))
def test_the_largest_sizes_are_what_trying_every_size_finds(
    chosen: tuple[Plan, str], at: int, above: int
) -> None:
    """Budgets on the edge of some size, where chunks that shrink as batches grow would mislead a bisection."""
    plan, kind = chosen

    def needs(key: str, size: int) -> tuple[int, int]:
        table = table_of(plans.replace(plan, {key: size}), device(kind, 1))
        return table.device_bytes, table.at_most_bytes

    longest = model_of(plan).max_positions
    for key, sizes, find in (
        ("train.batch_size", range(1, 900), largest_micro_batch),
        ("data.sequence_length", range(8, min(longest, 8000) + 1, 8), largest_sequence_length),
    ):
        bytes_of = {size: needs(key, size) for size in sizes}
        usable = bytes_of[sizes[at % len(sizes)]][1] - above
        sure = [size for size, (_, most) in bytes_of.items() if most <= usable]
        tight = [size for size, (least, _) in bytes_of.items() if least <= usable]
        found = find(plan, device(kind, usable))
        if found is not None and found.size > sizes[-1]:
            assert needs(key, found.size)[1] <= usable < needs(key, found.size + sizes.step)[1]
            continue
        wanted = [*tight[-1:], *sure[-1:]]
        assert (found.size if found else None) == (wanted[-1] if wanted else None)
        if found is not None:
            assert found.verdict is (Verdict.FITS if sure else Verdict.TIGHT)


@settings(max_examples=25, deadline=None)
@given(plans_and_kinds(), st.integers(1, LARGEST_BATCH), st.integers(1, 4000))
def test_no_larger_batch_needs_less_than_its_bound(
    chosen: tuple[Plan, str], rows: int, more: int
) -> None:
    plan, kind = chosen
    budget = device(kind, 1)
    small = plans.replace(plan, {"train.batch_size": rows})
    large = plans.replace(plan, {"train.batch_size": rows + more})
    bound = _least_beyond_batch(table_of(small, budget).device_bytes, small)
    assert table_of(large, budget).device_bytes >= bound
    short = plans.replace(plan, {"data.sequence_length": 8 * (rows % 1000 + 1)})
    long = plans.replace(plan, {"data.sequence_length": 8 * (rows % 1000 + 1 + more)})
    bound = _least_beyond_length(table_of(short, budget).device_bytes, short)
    assert table_of(long, budget).device_bytes >= bound


def test_rows_are_never_shorter_than_their_stride() -> None:
    plan = plans.replace(Plan(), {"data.sequence_length": 512, "data.stride": 500})
    need = table_of(plans.replace(plan, {"data.sequence_length": 504}), device("gpu", 1))
    for usable, verdict in (
        (need.at_most_bytes, Verdict.FITS),
        (need.device_bytes, Verdict.TIGHT),
    ):
        found = largest_sequence_length(plan, device("gpu", usable))
        assert found is not None
        assert (found.size, found.verdict) == (504, verdict)
    assert largest_sequence_length(plan, device("gpu", need.device_bytes // 2)) is None


@pytest.mark.parametrize("backend", ["torch", "jax"])
@pytest.mark.parametrize("model", ["smollm2-135m", "llama-3.2-1b", "llama-3.1-8b"])
def test_the_smallest_device_is_the_first_of_the_catalog_that_fits(
    backend: str, model: str
) -> None:
    plan = plans.replace(
        Plan(), {"backend": backend, "model.name": model, "data.sequence_length": 2048}
    )
    devices = catalog_budgets(plan)
    working = [
        d.usable_bytes
        for n, d in devices.items()
        if table_of(planned_on(plan, n), d).verdict is Verdict.FITS
    ]
    found = smallest_device(plan, devices)
    assert (devices[found].usable_bytes if found else None) == min(working, default=None)
    pinned = frozenset(
        f"optimize.{name}"
        for name in ("precision", "lora_rank", "compile", "optimizer_offload", "activation_offload")
    )
    fits = {n: fit(planned_on(plan, n), d, pinned) for n, d in devices.items()}
    working = [
        devices[n].usable_bytes
        for n, found in fits.items()
        if found.after.verdict is Verdict.FITS and not found.result_changes
    ]
    found = smallest_device_fitted(plan, devices, pinned)
    assert (devices[found].usable_bytes if found else None) == min(working, default=None)


def test_the_solver_leaves_alone_what_is_trained_on() -> None:
    """Every other row is its to change."""
    sizes = {row.key for row in OPTIMIZATIONS if row.size}
    others = {"data.streaming", "data.isolate_documents", "hybrid.mode"}
    assert {row.key for row in OPTIMIZATIONS} == {*(row.key for row in FREE), *sizes, *others}
    for row in FREE:
        values = row.values(Plan())
        classes = {row.result_of(a, b) for a in values for b in values} - {Result.SAME}
        assert bool(classes) == (row.key in ALTERING)
        assert classes.isdisjoint({Result.DATA, Result.PREDICTED})


def test_more_devices_are_used_only_if_allowed_and_only_if_they_are_faster() -> None:
    plan = plans.replace(LLAMA, {"train.batch_size": 8})
    budget = catalog_budgets(plan)["h100-80gb"]
    by = {most: fit(plan, budget, PINNED, devices=most).plan for most in (None, 2, 64)}
    counts = {most: found.device.count for most, found in by.items()}
    assert counts == {None: 1, 2: 2, 64: 8}, "8 rows cannot be shared by more"
    times = [seconds(found, budget) for found in by.values()]
    assert times == sorted(times, reverse=True)
    kept = fit(plan, budget, PINNED | {"device.count"}, devices=8)
    assert kept.plan.device.count == 1
    small = plans.replace(Plan(), {"model.name": "stories", "train.batch_size": 8})
    slow_link = msgspec.structs.replace(budget, link_bytes_per_second=1e6)
    assert fit(small, slow_link, PINNED, devices=8).plan.device.count == 1, (
        "the exchange takes longer"
    )


def test_a_pinned_micro_batch_or_sharding_holds_on_several_devices() -> None:
    plan = plans.replace(LLAMA, {"train.batch_size": 2, "optimize.accumulation_steps": 4})
    budget = catalog_budgets(plan)["h100-80gb"]
    for key, most in (("train.batch_size", 4), ("optimize.accumulation_steps", 2)):
        found = fit(plan, budget, PINNED | {key}, devices=8).plan
        assert plans.get(found, key) == plans.get(plan, key)
        assert found.device.count <= most
    alone = fit(plan, budget, PINNED | {"optimize.sharding"}, devices=8).plan
    assert (alone.device.count, alone.optimize.sharding) == (1, "none")
