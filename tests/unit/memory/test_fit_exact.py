"""`fit --exact` asks only what decides, and finds what knowing everything would find."""

from __future__ import annotations

import random
from collections.abc import Iterable

from hypothesis import given, settings
from hypothesis import strategies as st

from memconsole.cli.plans.fit_exact import fit_exactly
from memconsole.memory.answers.solve import fit
from memconsole.memory.estimate import table_of
from memconsole.memory.exact.sharpen import KnownExact
from memconsole.memory.exact.timeline import Exact, ExactPhase
from memconsole.memory.tracers.exact_book import ExactBook, Progress
from memconsole.plan import plan as plans
from memconsole.plan.machine.budget import Budget
from memconsole.plan.plan import Plan
from tests.unit.memory.cards import card

PLAN = plans.replace(
    Plan(), {"model.name": "gpt2", "data.sequence_length": 512, "train.batch_size": 8}
)
KEEP = frozenset(
    f"optimize.{name}"
    for name in ("lora_rank", "compile", "optimizer_offload", "activation_offload")
)


class Oracle(ExactBook):
    """Answers at once: a plan's phases are the formula's times a factor of its own, within the band."""

    def __init__(self, seed: int, mute: bool = False) -> None:
        super().__init__()
        self._seed = seed
        self._mute = mute
        self.asked: list[Plan] = []

    def truth(self, plan: Plan, budget: Budget) -> KnownExact:
        table = table_of(plan, budget)
        low = table.band_bytes[0] / table.device_bytes
        factor = random.Random(f"{self._seed}{plan}").uniform(low + 0.01, 1.15)
        phases = {n: ExactPhase(total_bytes=int(t * factor)) for n, t in table.phases.items()}
        return KnownExact(exact=Exact(phases=phases, source="oracle"))

    def lookup(self, plan: Plan, budget: Budget) -> KnownExact | None:
        known = plan in self.asked and not self._mute
        return self.truth(plan, budget) if known else None

    def ask(
        self, plan: Plan, budget: Budget, neighbours: Iterable[Plan] = (), *, trace: bool = True
    ) -> None:
        self.asked.append(plan)

    def progress(self, plan: Plan, budget: Budget) -> Progress:
        return Progress(problem="no tracer" if self._mute else "")


@settings(max_examples=settings().max_examples // 10)
@given(st.integers(0, 10_000), st.integers(1_500, 12_000))
def test_the_exact_fit_is_that_of_someone_who_knows_every_plan_exactly(
    seed: int, mebibytes: int
) -> None:
    book, budget = Oracle(seed), card(mebibytes << 20)
    found, problem = fit_exactly(book, PLAN, budget, KEEP, 60)
    wanted = fit(PLAN, budget, KEEP, lambda p, on: table_of(p, on, book.truth))
    assert problem == ""
    assert found.fits == wanted.fits
    if wanted.fits:
        assert found.plan == wanted.plan
        assert found.after == wanted.after
        assert found.after.source == "oracle"
    assert len(book.asked) == len(set(book.asked)), "nothing is asked twice"


def test_without_a_tracer_the_formula_decides_and_the_reason_is_told() -> None:
    budget = card(6 << 30)
    book = Oracle(1, mute=True)
    found, problem = fit_exactly(book, PLAN, budget, KEEP, 60)
    assert problem == "no tracer"
    assert found == fit(PLAN, budget, KEEP)


def test_a_budget_beyond_every_band_asks_nothing_but_the_best() -> None:
    book = Oracle(2)
    found, _ = fit_exactly(book, PLAN, card(1 << 50), KEEP, 60)
    assert book.asked == [found.plan]
