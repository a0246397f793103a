"""`memconsole fit`: what it prints, what it refuses, and its exit codes."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from memconsole.cli.main import cli
from memconsole.cli.plans import fit_options, fit_report
from memconsole.memory.answers.solve import fit
from memconsole.plan.machine.budget import Budget
from memconsole.plan.plan import Plan, PlanError, apply_settings, replace
from memconsole.plan.plan_file import loads

LARGE = ("--set", "model.name=llama-3.2-1b", "--set", "device.name=rtx-4090", "--set",
         "data.sequence_length=2048", "--set", "train.batch_size=8", "--set",
         "train.max_steps=1000000")  # fmt: skip
TIGHT = (*LARGE, "--budget", "18GiB", "--keep", "optimizer_offload")
HOPELESS = ("--set", "model.name=llama-3.1-8b", "--set", "device.name=rtx-3060-12gb", "--keep",
            "lora_rank", "--keep", "optimizer_offload", "--keep", "activation_offload")  # fmt: skip

FEW = tuple(
    word
    for key in ("lora_rank", "optimizer", "precision", "activation_offload")
    for word in ("--keep", key)
)
"""Settings that stay: of what is left free, a fit is found in a moment."""


@cache
def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, list(arguments))


def answer(*arguments: str) -> dict[str, Any]:
    result = run("fit", *arguments, "--json")
    assert result.exit_code in (0, 3), result.output
    found = json.loads(result.stdout)
    assert (result.exit_code == 0) == found["fits"]
    assert isinstance(found, dict)
    return found


def priced(found: dict[str, Any], tmp_path: Path, *settings: str) -> dict[str, Any]:
    """What `memconsole plan` says of the fitted plan, with settings changed."""
    import tomli_w

    file = tmp_path / "plan.toml"
    file.write_text(tomli_w.dumps(found["plan"]))
    result = run("plan", "--plan", str(file), *settings, "--json")
    assert result.exit_code in (0, 3), result.output
    document = json.loads(result.stdout)
    assert isinstance(document, dict)
    return document


def test_the_fitted_plan_fits_and_its_largest_sizes_are_the_largest(tmp_path: Path) -> None:
    found = answer(*LARGE)
    assert found["fits"]
    assert not found["before"]["fits"]
    table = priced(found, tmp_path)
    assert table["verdict"] == "fits"
    assert table["device_bytes"] == found["after"]["device_bytes"]
    for key, step in (("train.batch_size", 1), ("data.sequence_length", 8)):
        name = {"train.batch_size": "largest_micro_batch"}.get(key, "largest_sequence_length")
        size = found[name]["fitted"]
        for more, fits in ((0, True), (step, False)):
            verdict = priced(found, tmp_path, "--set", f"{key}={size + more}")["verdict"]
            assert (verdict == "fits") == fits
    device = found["smallest_device"]["given"]
    assert (
        priced({"plan": found["given"]}, tmp_path, "--set", f"device.name={device}")["verdict"]
        == "fits"
    )


def test_no_single_free_toggle_makes_the_fitted_plan_faster_and_fits(tmp_path: Path) -> None:
    """Of the toggles that leave the result alone, as the plan's own table of savings has them."""
    table = priced(answer(*LARGE), tmp_path)
    free = table["device"]["usable_bytes"] - table["band_bytes"][1]
    for toggle in table["toggles"]:
        harmless = toggle["key"] in (
            "optimize.gradient_checkpointing", "optimize.accumulation_steps",
            "optimize.fused_loss", "optimize.compile",
        )  # fmt: skip
        if harmless and toggle["available"] and free + toggle["saves_bytes"] >= 0:
            assert toggle["time_factor"] >= 1


def test_text_names_changes_result_time_sizes_and_device() -> None:
    result = run("fit", *TIGHT)
    assert result.exit_code == 0
    for words in (
        "as given: does not fit, ", "fitted:   fits, ", "optimize.gradient_checkpointing",
        "result: changed by 8-bit optimizer state", "per token", "largest micro-batch",
        "largest sequence length", "smallest device", "allocated",
    ):  # fmt: skip
        assert words in result.output
    lines = result.output.splitlines()
    assert all(len(line) <= 120 for line in lines if not line.startswith("  note: "))


def test_text_says_where_the_model_s_positions_limit_the_length() -> None:
    result = run("fit", "--set", "device.name=t4")
    (row,) = (line for line in result.output.splitlines() if "largest sequence length" in line)
    assert row.split() == [
        *("largest", "sequence", "length", "2,048", "2,048"),
        *("tokens;", "2,048:", "the", "model's", "positions"),
    ]


def test_toml_is_the_fitted_plan() -> None:
    result = run("fit", *LARGE, "--toml")
    assert result.exit_code == 0
    assert loads(result.stdout).optimize.accumulation_steps > 1
    assert run("fit", *HOPELESS, "--budget", "1GiB", "--toml").stdout == ""


def test_what_is_kept_does_not_change() -> None:
    free = {change["key"] for change in answer(*TIGHT)["changes"]}
    assert "optimize.optimizer" in free
    kept = answer(*TIGHT, "--keep", "optimizer", "--keep", "optimize.fused_loss")
    assert not {c["key"] for c in kept["changes"]} & {"optimize.optimizer", "optimize.fused_loss"}
    held = ["optimize.fused_loss", "optimize.optimizer", "optimize.optimizer_offload"]
    assert kept["kept"] == held


def test_where_nothing_fits_the_floor_is_named_and_the_code_is_three() -> None:
    found = answer(*HOPELESS)
    assert not found["fits"]
    floor = found["floor"]
    assert floor["bytes"] == max(found["after"]["components"].values())
    assert floor["phase"] == found["after"]["peak_phase"]
    result = run("fit", *HOPELESS)
    assert result.exit_code == 3
    assert "no settings fit 11.8 GiB: at least " in result.output
    assert floor["component"] in result.output


def test_a_budget_replaces_the_usable_bytes() -> None:
    found = answer("--set", "device.name=rtx-4090", "--budget", "800MiB", *FEW)
    assert found["device"]["usable_bytes"] == 800 << 20
    assert found["device"]["usable_because"] == "--budget"
    assert answer("--budget", "12GB", *FEW)["device"]["usable_bytes"] == 12 * 10**9
    assert answer("--budget", "99TiB", *FEW)["device"]["total_bytes"] == 99 << 40


@pytest.mark.parametrize(
    "amount", ["", "12", "twelve", "-3GiB", "12 QiB", "nan", "infGiB", "1e400GiB"]
)
def test_a_budget_that_is_none_is_one_clear_line(amount: str) -> None:
    result = run("fit", f"--budget={amount}")
    assert type(result.exception).__name__ == "PlanError"
    words = str(result.exception)
    assert "\n" not in words
    assert "12GiB" in words


def test_an_unknown_key_to_keep_names_the_nearest() -> None:
    assert 'did you mean "optimize.precision"' in str(
        run("fit", "--keep", "optimize.precison").exception
    )
    assert "optimize.lora_rank" in str(run("fit", "--keep", "zzz").exception)


def test_torch_compile_stays_off_where_this_machine_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    def device(local: bool) -> Budget:
        return Budget(name="cpu", kind="cpu", memory_label="host RAM", total_bytes=1 << 40,
                      usable_bytes=1 << 40, why="test", local=local)  # fmt: skip

    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.delenv("CXX", raising=False)
    keep, notes = fit_options.kept_on_machine(Plan(), device(local=True), frozenset())
    assert keep == {"optimize.compile"}
    assert "C++ compiler" in notes[0]
    assert not fit(Plan(), device(local=True), keep).plan.optimize.compile
    assert fit_options.kept_on_machine(Plan(), device(local=False), frozenset()) == (
        frozenset(),
        (),
    )
    on = replace(Plan(), {"optimize.compile": True})
    assert fit_options.kept_on_machine(on, device(local=True), frozenset()) == (frozenset(), ())


def test_more_devices_are_used_where_they_are_allowed_and_told() -> None:
    large = (*LARGE, "--set", "device.name=rtx-3060-12gb", *FEW)
    found = answer(*large, "--devices", "4")
    changes = {change["key"]: change["after"] for change in found["changes"]}
    assert changes["device.count"] == found["plan"]["device"]["count"] == 4
    assert changes["optimize.sharding"] == found["plan"]["optimize"]["sharding"]
    assert found["result_changes"] == []
    rows = found["plan"]["train"]["batch_size"] * found["plan"]["optimize"]["accumulation_steps"]
    assert 4 * rows == 8
    assert any("on 4 devices: every device holds" in note for note in found["notes"])
    refused = run("fit", "--devices", "4", "--set", "device.name=cpu")
    assert isinstance(refused.exception, PlanError)
    assert str(refused.exception).startswith("--devices 4: ")
    assert "is one device" in str(refused.exception)


SHARDED = (
    "--set", "model.name=llama-3.1-8b", "--set", "device.name=a100-40gb", "--set", "device.count=8", "--set",
    "optimize.sharding=fsdp", "--set", "data.sequence_length=2048", "--set", "train.batch_size=1", "--devices", "2",
    "--keep", "compile", "--keep", "fused_loss", "--keep", "optimizer_in_backward", "--keep", "activation_offload",
    "--keep", "lora_rank",
)  # fmt: skip
"""8B on at most two of eight devices: nothing fits at the same result."""


def test_the_options_that_make_it_faster_do_so() -> None:
    line = next(x for x in run("fit", *SHARDED).output.splitlines() if "faster with" in x)
    options, _, speedup = line.partition("faster with ")[2].partition(": x")
    assert options == "--allow 16-bit --allow 8-bit-state"
    faster = answer(*SHARDED, *options.split())
    given = answer(*SHARDED)
    assert faster["plan"] == given["faster"]["plan"]
    assert given["run_seconds"] / faster["run_seconds"] == pytest.approx(float(speedup), abs=0.06)


def test_the_settings_of_a_tight_plan_with_less_change_are_all_named() -> None:
    given = replace(
        Plan(), {"device.name": "a100-40gb", "device.count": 8, "optimize.sharding": "fsdp"}
    )
    tight = replace(given, {"device.count": 1, "optimize.sharding": "none", "train.batch_size": 2,
                            "optimize.accumulation_steps": 64, "optimize.precision": "bf16"})  # fmt: skip
    words = fit_report.only_tight_note(given, tight).partition("but tight: ")[2]
    assert apply_settings(given, [word.replace(" = ", "=") for word in words.split(", ")]) == tight
    assert fit_report.only_tight_note(given, given).endswith("the plan as given")
