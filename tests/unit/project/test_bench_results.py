"""What `make bench` stored meets its bars, is whole, and is what the pages of docs/ quote."""

from __future__ import annotations

import json

import pytest

from memconsole.plan import catalog
from memconsole.plan.check import check
from memconsole.plan.plan import Plan, PlanError, replace
from memconsole.plan.toggles.optimizations import check_conflicts, check_trainable
from tests.bench import (
    agreement,
    bitnet,
    gpu,
    optimizations,
    peers,
    presets,
    resuming,
    scanned,
    step_parts,
    tokenizing,
    waiting,
    whole_run,
    window_reading,
)
from tests.bench.trained import BACKENDS, MAKERS, results_of

PAGE = optimizations.PAGE.read_text(encoding="utf-8")
RESULTS = json.loads(optimizations.RESULTS.read_text())["results"]
PAGE_OF_SYSTEMS = scanned.PAGE.read_text(encoding="utf-8")
BITNET = json.loads(bitnet.RESULTS.read_text())["results"]
AGREEMENT = json.loads(agreement.RESULTS.read_text())["results"]


def test_the_page_quotes_the_table_of_optimizations() -> None:
    assert f"\n{optimizations.table(RESULTS)}\n" in PAGE


def test_every_row_was_measured_in_both_backends_or_is_refused_in_one() -> None:
    for case, (_, names) in optimizations.CASES.items():
        for name in names:
            found = [RESULTS[case][backend][name] for backend in BACKENDS]
            assert sum("refused" in row for row in found) <= 1, name


def test_rows_of_another_environment_say_so() -> None:
    for case in RESULTS.values():
        for rows in case.values():
            found = {name for name, row in rows.items() if "environment" in row}
            assert found == set(rows) & set(optimizations.ENVIRONMENTS)


def test_only_known_rows_fall_short_and_all_together_save_what_they_should() -> None:
    assert set(optimizations.short(RESULTS)) == optimizations.FALLS_SHORT
    found = optimizations.all_on(RESULTS)
    for backend, (times, apart) in found.items():
        assert times >= optimizations.TIMES[backend]
        assert apart <= optimizations.SAME_LOSS
    assert set(found) == set(BACKENDS)
    words = " ".join(PAGE.split())
    torch, jax = (f"{found[backend][0]:.1f} times smaller" for backend in BACKENDS)
    assert f"above start is {torch} than in the plain run in torch, and {jax} in JAX" in words
    apart = max(apart for _, apart in found.values())
    assert f"with the same loss to {apart:.3%}".replace("%", " %") in words


def test_a_row_that_falls_short_is_found() -> None:
    rows = RESULTS["GPT 13.9 M"]["torch"]
    spoiled = {**rows, "checkpointing, full": rows["plain"]}
    found = set(optimizations.short({"GPT 13.9 M": {"torch": spoiled}}))
    assert found - optimizations.FALLS_SHORT == {("GPT 13.9 M", "torch", "checkpointing, full")}


def test_both_backends_agree_in_every_row_that_both_train() -> None:
    assert set(AGREEMENT) == set(optimizations.ROWS) - set(agreement.ALONE)
    differences = {name: one["largest_difference"] for name, one in AGREEMENT.items()}
    assert max(differences.values()) <= agreement.BAR
    lion = differences.pop("Lion")
    assert f"{lion:.1%} apart in every row".replace("%", " %") in " ".join(PAGE.split())
    assert max(differences.values()) <= 0.0003


def test_the_page_quotes_what_bitnet_codes_cost_and_both_backends_tell_the_same() -> None:
    words = " ".join(bitnet.PAGE.read_text(encoding="utf-8").split())
    assert bitnet.sentence(BITNET) in words
    torch, jax = (BITNET[backend]["validation"] for backend in BACKENDS)
    for when in ("before", "after"):
        assert jax[when]["loss"] == pytest.approx(torch[when]["loss"], rel=agreement.BAR)


def launched(plan: Plan) -> None:
    """The checks before a launch."""
    check_trainable(plan)
    check_conflicts(plan)
    check(plan)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_was_refused_is_refused_now(backend: str) -> None:
    names = optimizations.CASES["GPT 13.9 M"][1]
    refused = [n for n, row in RESULTS["GPT 13.9 M"][backend].items() if "refused" in row]
    for name in refused:
        plan = replace(Plan(), {**names[name], "backend": backend, "device.name": "cpu"})
        with pytest.raises(PlanError):
            launched(plan)


def test_the_page_quotes_the_parts_of_a_torch_step() -> None:
    results = json.loads(step_parts.RESULTS.read_text())["results"]
    assert set(results) == {case.name for case in step_parts.MEASURED}
    assert f"\n{step_parts.table(results)}\n" in peers.PAGE.read_text(encoding="utf-8")


def test_reading_windows_is_fast_and_flat_in_the_size_of_the_file() -> None:
    document = json.loads(window_reading.RESULTS.read_text())
    results, found = document["results"], window_reading.figures(document["results"])
    assert document["copies"] >= 98  # whole chunks: a hundred times as large
    assert results["large"]["file_bytes"] > 95 * results["small"]["file_bytes"]
    assert found["growth_bytes"] <= window_reading.MOST_GROWTH
    assert found["time_ratio"] < 1.5
    assert found["share_of_h5py"] >= window_reading.LEAST_SHARE
    assert found["times_random_rows"] >= window_reading.LEAST_TIMES
    page = window_reading.PAGE.read_text(encoding="utf-8")
    table = window_reading.table(results)
    assert f"<!-- window-reading -->\n{table}\n<!-- /window-reading -->" in page


def test_tokenizing_while_training_is_as_fast_as_the_bare_library() -> None:
    results = json.loads(tokenizing.RESULTS.read_text())["results"]
    assert len(results) == 3
    for name, one in results.items():
        assert "answers" in name or one["share_by_cpu"] >= tokenizing.BAR
        assert "answers" in name or one["share_by_clock"] >= tokenizing.BAR
        assert one["kept_per_cpu_second"] > 50 * one["bare_per_cpu_second"]
    assert f"\n{tokenizing.table(results)}\n" in tokenizing.PAGE.read_text(encoding="utf-8")


def test_a_place_far_into_the_data_is_reached_in_a_second() -> None:
    results = json.loads(resuming.RESULTS.read_text())["results"]
    for name, one in results.items():
        assert one["rows"] > 7e6
        if "again" not in name:
            assert max(one["first"]["clock"], one["last"]["clock"]) < resuming.BAR
    assert f"\n{resuming.table(results)}\n" in resuming.PAGE.read_text(encoding="utf-8")


def test_the_page_quotes_what_every_preset_learned() -> None:
    results = json.loads(presets.RESULTS.read_text())["results"]
    page = presets.PAGE.read_text(encoding="utf-8")
    for name, made in (("presets", presets.table), ("apart", presets.apart)):
        assert f"<!-- {name} -->\n{made(results)}\n<!-- /{name} -->" in page
    assert set(results) == set(presets.SYSTEMS)


@pytest.mark.parametrize("preset", presets.SYSTEMS)
def test_every_preset_beats_its_baselines_in_both_backends(preset: str) -> None:
    results = json.loads(presets.RESULTS.read_text())["results"][preset]
    measures = presets.SYSTEMS[preset].measures
    assert set(results) == set(BACKENDS)
    for seeds in results.values():
        assert str(presets.SEED) in seeds
        for one in seeds.values():
            values = one["measures"]
            wanted = {key for m in measures for key in (m.key, *m.baselines.values())}
            assert wanted <= set(values)
            assert all(m.beats(values) for m in measures if m.certain)


def test_the_backends_learn_the_same() -> None:
    results = json.loads(presets.RESULTS.read_text())["results"]
    assert presets.beyond(results) == []
    spoiled = json.loads(json.dumps(results["lqr"]))
    spoiled["jax"][str(presets.SEED)]["measures"]["loss"] *= 1.03
    assert presets.beyond({**results, "lqr": spoiled}) == ["lqr"]
    values = {**spoiled["jax"][str(presets.SEED)]["measures"], "loss": 1.0}
    assert not presets.SYSTEMS["lqr"].measures[0].beats(values)


def test_no_preset_waits_for_its_data() -> None:
    results = json.loads(waiting.RESULTS.read_text())["results"]
    assert set(results) == set(waiting.MADE)
    for found in results.values():
        assert all(waiting.share(found[backend]) < waiting.BAR for backend in BACKENDS)
    assert f"\n{waiting.table(results)}\n" in waiting.PAGE.read_text(encoding="utf-8")


def test_several_steps_in_one_dispatch_are_not_worth_it_for_the_preset() -> None:
    results = json.loads(scanned.RESULTS.read_text())["results"]
    assert f"<!-- scanned -->\n{scanned.table(results)}\n<!-- /scanned -->" in PAGE_OF_SYSTEMS
    assert set(results) == {str(rows) for rows in scanned.BATCHES}
    assert all(one["same_bits"] for one in results.values())
    rows = catalog.preset("lqr").train.batch_size
    assert scanned.gain(results[str(rows)]) < scanned.WORTH


@pytest.mark.parametrize("case", [*gpu.CASES, *gpu.ladder()], ids=lambda case: case.name)
def test_what_is_to_be_measured_on_a_card_can_be_trained_there(case: gpu.Case) -> None:
    for _, _, plan in gpu.contenders(case, "cuda"):
        check_conflicts(plan)
        check_trainable(plan)


def test_a_contender_that_is_missing_is_shown_as_missing() -> None:
    one = {
        "tokens_per_second": 2e3,
        "flops_utilization": 0.5,
        "peak_bytes": 2**30,
        "step_seconds": 2,
    }
    ours = {**one, "estimated_peak_bytes": 2**29, "estimated_step_seconds": 3}
    table = gpu.table({"work": {"nanoGPT": {"problem": "missing"}, "Trainer": one, "torch": ours}})
    assert table.splitlines()[2:] == [
        "| work | nanoGPT | missing |  |  |  |  |  |  |  |",
        "| work | Trainer | 2,000 | 1.00 | 50.0% | 2,000 |  | 1,024 |  | 1.00 |",
        "| work | torch | 2,000 | 1.00 | 50.0% | 2,000 | 3,000 | 1,024 | 512 | 1.00 |",
    ]


def test_the_page_quotes_the_table_of_the_card() -> None:
    found = gpu.table(json.loads(gpu.RESULTS.read_text())["results"])
    page = gpu.PAGE.read_text(encoding="utf-8")
    assert f"<!-- card -->\n{found}\n<!-- /card -->" in page


@pytest.mark.parametrize("maker", MAKERS)
def test_the_page_quotes_the_tables_of_peers(maker: str) -> None:
    found = json.loads(results_of("peers", maker).read_text())["results"]
    page = peers.PAGE.read_text(encoding="utf-8")
    for mark, table in peers.TABLES.items():
        assert f"<!-- {mark}-{maker} -->\n{table(found)}\n<!-- /{mark}-{maker} -->" in page
    whole = whole_run.table(json.loads(results_of("whole_run", maker).read_text()))
    assert f"<!-- whole-run-{maker} -->\n{whole}\n<!-- /whole-run-{maker} -->" in page
