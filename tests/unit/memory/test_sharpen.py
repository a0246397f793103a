"""Exact numbers in a formula's table: every number keeps its tier, sums stay sums, savings compare like with like."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memconsole.memory.coefficients import Certainty, runtime
from memconsole.memory.estimate import estimate, table_of
from memconsole.memory.exact.sharpen import KnownExact, alike, saved, sharpened
from memconsole.memory.exact.timeline import Exact, ExactPhase
from memconsole.memory.formula import PHASES
from memconsole.memory.table import COMPONENTS, MemoryTable, Tier
from memconsole.memory.tracers.question import traced_plan
from memconsole.plan import plan as plans
from memconsole.plan.machine.budget import Budget
from memconsole.plan.plan import Plan, replace
from memconsole.units import MIB

GIB = 2**30
PLAN = plans.replace(Plan(), {"model.name": "gpt2", "train.batch_size": 4})
JAX = plans.replace(PLAN, {"backend": "jax"})


def device(kind: str) -> Budget:
    return Budget(
        name=kind, kind=kind, memory_label="", total_bytes=24 * GIB, usable_bytes=24 * GIB, why=""
    )


def exact(phases: dict[str, tuple[int, dict[str, int]]], **changes: Any) -> Exact:
    found = {n: ExactPhase(total_bytes=t, components=c) for n, (t, c) in phases.items()}
    return Exact(**{"phases": found, "source": "a test", **changes})


def consistent(table: MemoryTable) -> None:
    """What a person may add up."""
    for phase, total in table.phases.items():
        assert sum(c.at(phase) for c in table.components) == total, phase
    assert table.peak_bytes == table.phases[table.peak_phase] == max(table.phases.values())
    assert table.peak_bytes <= table.reserved_bytes <= table.device_bytes
    low, high = table.band_bytes
    assert low <= table.device_bytes <= high
    assert tuple(c.name for c in table.components)[: len(COMPONENTS)] == COMPONENTS


def running_bytes(table: MemoryTable) -> int:
    """The framework's own bytes, which no tracer sees."""
    return max(next(c for c in table.components if c.name == "runtime").phases.values())


PARTS = {"weights": GIB, "optimizer state": 2 * GIB, "activations": GIB // 2}
TRACED = {
    "forward": (sum(PARTS.values()), PARTS),
    "backward": (4 * GIB, {**PARTS, "logits and loss": GIB // 2}),
}


@pytest.mark.parametrize("kind", ["cpu", "gpu", "rocm", "apple"])
def test_traced_phases_stand_beside_formula_ones_each_with_its_tier(kind: str) -> None:
    before = table_of(PLAN, device(kind))
    after = sharpened(before, KnownExact(exact=exact(TRACED, reserved_bytes=5 * GIB)))
    consistent(after)
    workspace = running_bytes(before)
    assert after.phases["backward"] == 4 * GIB + workspace
    assert after.phases["evaluation"] == before.phases["evaluation"]
    assert after.phase_tier("backward") == Tier.EXACT
    assert after.phase_tier("evaluation") == Tier.FORMULA
    weights = next(c for c in after.components if c.name == "weights")
    assert (weights.at("forward"), weights.tier_at("forward")) == (GIB, Tier.EXACT)
    assert weights.tier_at("optimizer step") == Tier.FORMULA
    running = next(c for c in after.components if c.name == "runtime")
    assert running.tier_at("backward") == Tier.FORMULA, "measured, not traced"
    assert after.tier == Tier.EXACT
    assert after.formula is before
    assert before.formula is None


def test_reserved_is_exact_where_it_was_replayed_and_device_is_not_where_a_driver_charges() -> None:
    before = table_of(PLAN, device("gpu"))
    replayed = sharpened(before, KnownExact(exact=exact(TRACED, reserved_bytes=5 * GIB)))
    assert (replayed.reserved_bytes, replayed.reserved_tier) == (5 * GIB, Tier.EXACT)
    assert replayed.device_bytes == 5 * GIB + runtime("torch", "gpu").context_bytes
    assert replayed.device_tier == Tier.FORMULA
    shared = sharpened(
        before, KnownExact(exact=exact(TRACED, reserved_bytes=5 * GIB), replayed=False)
    )
    assert shared.reserved_tier == Tier.FORMULA
    assert shared.tier == Tier.EXACT
    plain = sharpened(before, KnownExact(exact=exact(TRACED)))
    assert plain.reserved_tier == Tier.FORMULA
    assert plain.reserved_bytes > plain.peak_bytes
    on_cpu = sharpened(table_of(PLAN, device("cpu")), KnownExact(exact=exact(TRACED)))
    assert on_cpu.reserved_bytes == on_cpu.device_bytes == on_cpu.peak_bytes
    assert on_cpu.device_tier == Tier.EXACT


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_with_torch_compile_the_trace_without_is_moved_by_the_formulas_difference(
    kind: str,
) -> None:
    """Without a trace of compiled blocks no number of the peak may pass for exact."""
    eager = plans.replace(PLAN, {"model.name": "smollm2-135m", "optimize.fused_loss": True})
    fused = plans.replace(eager, {"optimize.compile": True})
    known = KnownExact(exact=exact(TRACED, reserved_bytes=5 * GIB))
    plain, by_formula = table_of(eager, device(kind)), table_of(fused, device(kind))
    traced = table_of(eager, device(kind), lambda plan, budget: known)
    moved = table_of(fused, device(kind), lambda plan, budget: known)
    consistent(moved)
    for phase in PHASES:
        change = by_formula.phases[phase] - plain.phases[phase]
        assert moved.phases[phase] == traced.phases[phase] + change
    assert moved.phases["backward"] != traced.phases["backward"]
    assert moved.tier == moved.device_tier == Tier.FORMULA
    assert moved.formula == by_formula
    assert "torch.compile" in moved.caveat
    assert saved(moved, traced)[1] == Tier.FORMULA


def test_plans_with_and_without_torch_compile_are_one_matter() -> None:
    fused = plans.replace(PLAN, {"optimize.compile": True})
    one, other = (traced_plan(plan, device("gpu")) for plan in (PLAN, fused))
    assert one == other


def test_jax_plans_with_and_without_a_loop_are_two_programs() -> None:
    loop = plans.replace(PLAN, {"backend": "jax"})
    unrolled = plans.replace(loop, {"optimize.compile": True})
    one, other = (traced_plan(plan, device("gpu")) for plan in (loop, unrolled))
    assert one.key != other.key
    assert other.plan.optimize.compile


def test_on_a_cpu_the_host_holds_the_tensors() -> None:
    before = table_of(PLAN, device("cpu"))
    after = sharpened(before, KnownExact(exact=exact(TRACED)))
    assert after.host_bytes - before.host_bytes == after.peak_bytes - before.peak_bytes
    assert after.host_tier == Tier.FORMULA


@given(
    st.sampled_from(("cpu", "gpu", "tpu")),
    st.integers(0, 8 * GIB),
    st.integers(0, 3 * GIB),
    st.booleans(),
)
def test_a_whole_programs_one_number_is_shared_out_and_never_exceeded(
    kind: str, arena: int, evaluated: int, refused: bool
) -> None:
    held = {"weights": 475 << 20, "optimizer state": 950 << 20}
    total = sum(held.values()) + arena
    before = table_of(JAX, device(kind))
    found = exact(
        {"backward": (total, held), "evaluation": (sum(held.values()) + evaluated, held)},
        program_phase="backward",
        out_of_memory=refused,
    )
    after = sharpened(before, KnownExact(exact=found))
    consistent(after)
    step = max(after.phases[p] for p in after.step_phases)
    assert step == total + running_bytes(before)
    exact_ones = [p for p in after.step_phases if after.phase_tier(p) == Tier.EXACT]
    assert len(exact_ones) == 1
    assert before.phases[exact_ones[0]] == max(before.phases[p] for p in before.step_phases)
    activations = next(c for c in after.components if c.name == "activations")
    assert activations.tier_at(exact_ones[0]) == (Tier.FORMULA if arena else Tier.EXACT)
    assert "whole step" in after.caveat
    assert after.out_of_memory == refused
    assert not (refused and after.fits)


@given(
    st.dictionaries(st.sampled_from(PHASES), st.tuples(st.integers(1, GIB), st.integers(0, GIB)))
)
def test_any_answer_makes_a_consistent_table(phases: dict[str, tuple[int, int]]) -> None:
    found = exact(
        {n: (a + b, {"weights": a, "an unknown part": 0}) for n, (a, b) in phases.items()}
    )
    consistent(sharpened(table_of(PLAN, device("gpu")), KnownExact(exact=found)))


def lookup_of(known: dict[Plan, KnownExact]) -> Any:
    return lambda plan, budget: known.get(plan)


def test_a_saving_is_exact_only_where_both_plans_are() -> None:
    other = plans.replace(PLAN, {"optimize.fused_loss": True})
    now = KnownExact(exact=exact(TRACED, reserved_bytes=5 * GIB))
    then = KnownExact(exact=exact({"backward": (3 * GIB, PARTS)}, reserved_bytes=4 * GIB))
    budget = device("gpu")

    def saving(known: dict[Plan, KnownExact]) -> Any:
        found = estimate(PLAN, budget, lookup_of(known))
        return next(s for s in found.savings if s.key == "optimize.fused_loss")

    by_formula = saving({})
    assert by_formula.tier == Tier.FORMULA
    one_sided = saving({PLAN: now})
    assert one_sided.saves_bytes == by_formula.saves_bytes, "never exact less formula"
    assert one_sided.tier == Tier.FORMULA
    assert saving({other: then}).saves_bytes == by_formula.saves_bytes
    both = saving({PLAN: now, other: then})
    assert both.saves_bytes == GIB
    assert both.tier == Tier.EXACT


def test_an_allocators_share_of_other_sizes_does_not_pass_for_a_saving() -> None:
    base = table_of(PLAN, device("gpu"))
    now = sharpened(base, KnownExact(exact=exact(TRACED, reserved_bytes=int(4.4 * GIB))))
    # The same live bytes; the share came from other sizes.
    after = sharpened(
        base, KnownExact(exact=exact(TRACED, reserved_bytes=int(4.2 * GIB)), replayed=False)
    )
    assert saved(now, after) == (0, Tier.FORMULA)


def test_tables_are_compared_at_the_tier_of_the_less_exact_one() -> None:
    base = table_of(PLAN, device("gpu"))
    sharp = sharpened(base, KnownExact(exact=exact(TRACED)))
    assert alike(sharp, base) == (base, base)
    assert alike(base, sharp) == (base, base)
    assert alike(sharp, sharp) == (sharp, sharp)


def test_the_band_is_the_formulas_until_exact_numbers_were_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    base = table_of(PLAN, device("gpu"))
    known = KnownExact(exact=exact(TRACED, reserved_bytes=5 * GIB))
    monkeypatch.setattr("memconsole.memory.exact.sharpen.certainty", lambda backend, kind: None)
    wide = sharpened(base, known)
    costs = runtime("torch", "gpu")
    least, most = (wide.reserved_bytes * factor for factor in costs.band)
    assert wide.band_bytes == costs.band_bytes(least, most)
    assert "not yet measured" in wide.band_from
    sure = Certainty(
        allocated=(0.99, 1.01), reserved=(0.97, 1.03), unreplayed=(0.8, 1.2),
        source="measured in a test",
    )  # fmt: skip
    monkeypatch.setattr("memconsole.memory.exact.sharpen.certainty", lambda backend, kind: sure)
    narrow = sharpened(base, known)
    assert narrow.band_from == "measured in a test"
    shared = sharpened(base, msgspec.structs.replace(known, replayed=False))
    for table in (narrow, shared):
        assert table.band_bytes[0] <= table.device_bytes <= table.band_bytes[1]
    assert shared.band_bytes[1] > narrow.band_bytes[1]
    assert narrow.band_bytes[0] >= narrow.peak_bytes * 0.99


def test_a_table_with_all_its_tiers_is_read_back_from_json() -> None:
    after = sharpened(table_of(PLAN, device("gpu")), KnownExact(exact=exact(TRACED)))
    assert msgspec.json.decode(msgspec.json.encode(after), type=MemoryTable) == after


def test_the_shipped_bands_cover_every_measured_case() -> None:
    from memconsole.memory.coefficients import coefficients
    from tests.accuracy.bands import certainties

    made = certainties()
    shipped = coefficients().exact
    assert {b: set(kinds) for b, kinds in made.items()} == {b: set(k) for b, k in shipped.items()}
    for backend, kinds in made.items():
        for kind, wanted in kinds.items():
            found = shipped[backend][kind]
            for name in ("allocated", "reserved", "unreplayed"):
                low, high = getattr(found, name)
                assert low <= getattr(wanted, name)[0] <= 1 <= getattr(wanted, name)[1] <= high


def test_the_shipped_bands_of_the_formula_cover_every_measured_case() -> None:
    from memconsole.memory.coefficients import coefficients
    from tests.accuracy.bands import formula_bands

    for (backend, kind), (low, high) in formula_bands().items():
        shipped = coefficients().runtime[backend][kind].band
        assert shipped[0] <= low < 1 < high <= shipped[1], (backend, kind)


@pytest.mark.parametrize(
    ("changes", "measured"),
    [
        ({}, (112, 114)),
        (
            {
                "data.sequence_length": 1024,
                "train.batch_size": 2,
                "optimize.fused_loss": True,
            },
            (104, 125),
        ),
    ],
)
def test_the_band_of_a_small_jax_run_covers_what_it_took(
    changes: dict[str, Any], measured: tuple[int, int]
) -> None:
    """MiB, as docs/estimates.md says."""
    plan = replace(Plan(), {"backend": "jax", "device.name": "cpu", **changes})
    low, high = (size / MIB for size in table_of(plan, device("cpu")).band_bytes)
    assert low <= measured[0] <= measured[1] <= high
