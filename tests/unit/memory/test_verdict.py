"""The three verdicts: one rule, the same in every place that shows one."""

from __future__ import annotations

import json

import msgspec
import pytest
from click.testing import CliRunner

from memconsole.cli.main import cli
from memconsole.devices.planned import catalog_budgets
from memconsole.memory.answers.solve import planned_on
from memconsole.memory.estimate import table_of
from memconsole.memory.verdict import Verdict, verdict_of
from memconsole.plan import plan as plans
from memconsole.plan.plan import Plan
from memconsole.tui.plan.dialogs.choices import choices_for
from tests.unit.memory.cards import card

GIB = 2**30
PLAN = plans.apply_settings(
    Plan(), ["model.name=gpt2", "device.name=rtx-4090", "data.sequence_length=1024"]
)


@pytest.mark.parametrize(
    ("usable", "verdict"),
    [(99, Verdict.DOES_NOT_FIT), (100, Verdict.TIGHT), (119, Verdict.TIGHT), (120, Verdict.FITS)],
)
def test_a_plan_is_tight_where_its_band_reaches_over_what_is_usable(
    usable: int, verdict: Verdict
) -> None:
    assert verdict_of(100, 120, usable) is verdict
    assert verdict_of(100, 120, usable, refused=True) is Verdict.DOES_NOT_FIT


def test_a_table_says_how_much_is_free_or_missing() -> None:
    table = table_of(PLAN, card(24 * GIB))
    needed, most = table.device_bytes, table.band_bytes[1]
    for usable, verdict, words in (
        (most + GIB, Verdict.FITS, "fits, "),
        (most - 1, Verdict.TIGHT, "tight, "),
        (needed - GIB, Verdict.DOES_NOT_FIT, "does not fit, 1.00 GiB over"),
    ):
        here = msgspec.structs.replace(table, budget=card(usable))
        assert here.verdict is verdict
        assert here.words.startswith(words)
        assert here.fits == (verdict is not Verdict.DOES_NOT_FIT)
        assert ("up to" in here.words) == (verdict is Verdict.TIGHT)


def test_plan_says_of_each_verdict_what_the_table_says() -> None:
    device = catalog_budgets(PLAN)["rtx-4090"]
    sized = {n: plans.replace(PLAN, {"train.batch_size": n}) for n in range(8, 200)}
    first: dict[Verdict, int] = {}
    for rows, plan in sized.items():
        first.setdefault(table_of(plan, device).verdict, rows)
    assert set(first) == set(Verdict)
    for verdict, rows in first.items():
        settings = plans.command_line(sized[rows])
        answer = CliRunner().invoke(cli, ["plan", *settings, "--json"])
        told = json.loads(answer.stdout)
        assert told["verdict"] == verdict
        assert told["fits"] == (verdict is not Verdict.DOES_NOT_FIT)
        assert answer.exit_code == (3 if verdict is Verdict.DOES_NOT_FIT else 0)


def test_the_device_picker_marks_each_device_with_its_verdict() -> None:
    words = {
        Verdict.FITS: "✓",
        Verdict.TIGHT: "▲ tight",
        Verdict.DOES_NOT_FIT: "✗ too small",
    }
    plan = plans.replace(PLAN, {"train.batch_size": 64})
    notes = {choice.value: choice.note for choice in choices_for("device", plan, None)[0]}
    for name, device in catalog_budgets(plan).items():
        assert words[table_of(planned_on(plan, name), device).verdict] in notes[name]
