"""The commands' documents, exit codes and error lines."""

import errno
import json
import os
import pwd
import signal
import tempfile
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from memconsole.announcing import launch_rows
from memconsole.cli.main import COMMANDS, cli, main
from memconsole.cli.runs import train
from memconsole.plan import catalog
from memconsole.plan.plan import Plan, PlanError, apply_settings, replace
from memconsole.plan.plan_file import dumps, loads
from memconsole.runs.record.directory import RunDirectory
from memconsole.runs.record.processes.identity import user_name
from memconsole.runs.record.run_store import create_run
from memconsole.start import check_launch
from memconsole.tui.screens.prompt import path_refusal

PLAN_KEYS = {
    "backend", "device", "tier", "components", "phases", "peak_phase", "peak_bytes", "reserved_bytes",
    "device_bytes", "host_bytes", "band_bytes", "fits", "toggles", "step_seconds",
    "tokens_per_second", "mfu", "epoch_minutes",
}  # fmt: skip


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, list(arguments))


@pytest.mark.parametrize("preset", sorted(catalog.presets()))
def test_every_preset_prices_as_json(preset: str) -> None:
    result = run("plan", "--preset", preset, "--json")
    assert result.exit_code in (0, 3), result.output
    found = json.loads(result.output)
    assert set(found) >= PLAN_KEYS
    assert (result.exit_code == 0) == found["fits"]
    for phase, total in found["phases"].items():
        assert total == sum(c["phases"].get(phase, 0) for c in found["components"])
    assert found["peak_bytes"] == max(found["phases"].values())
    assert found["peak_bytes"] == found["phases"][found["peak_phase"]]
    low, high = found["band_bytes"]
    assert low <= found["device_bytes"] <= high


def test_a_plan_too_large_for_its_device_ends_with_three() -> None:
    result = run(
        "plan", "--set", "model.name=llama-3.1-8b", "--set", "device.name=rtx-3060-12gb", "--json"
    )
    assert result.exit_code == 3
    assert not json.loads(result.output)["fits"]


def test_text_says_whether_it_fits() -> None:
    fits = run("plan", "--set", "device.name=rtx-3060-12gb")
    assert fits.exit_code == 0
    assert "fits, " in fits.output
    large = run("plan", "--set", "device.name=rtx-3060-12gb", "--set", "model.name=llama-3.1-8b")
    assert "does not fit, " in large.output
    assert " over" in large.output


@pytest.mark.parametrize(
    "settings",
    [
        ["device.name=a100-40gb", "device.count=2"],
        ["device.name=a100-40gb", "optimize.sharding=fsdp"],
        ["device.name=cpu", "backend=jax", "optimize.compile=true"],
    ],
)
def test_plan_says_why_train_refuses_it(settings: list[str]) -> None:
    with pytest.raises(PlanError) as refused:
        check_launch(apply_settings(Plan(), settings), None)
    words = [word for setting in settings for word in ("--set", setting)]
    assert json.loads(run("plan", *words, "--json").output)["refused"] == str(refused.value)
    assert f"\ntrain refuses this plan: {refused.value}\n" in run("plan", *words).output


def test_toml_of_a_plan_reads_back(tmp_path: Path) -> None:
    result = run("plan", "--set", "optimize.precision=bf16", "--toml")
    assert loads(result.output).optimize.precision == "bf16"
    file = tmp_path / "plan.toml"
    file.write_text(result.output)
    again = run("plan", "--plan", str(file), "--toml")
    assert again.output == result.output


@pytest.mark.parametrize("other", ["--toml", "--keys", "--catalog"])
def test_json_is_refused_where_something_else_is_printed(other: str) -> None:
    result = run("plan", other, "--json")
    assert result.exit_code == 2
    assert "--json" in result.output


def test_a_detached_run_is_told_as_json_if_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    made = create_run(Plan())
    monkeypatch.setattr(train, "start", lambda *ignored, **named: made)
    small = ("--set", "device.name=cpu", "--set", "model.target_params=100000")
    assert run("train", "--detach", *small).stdout == f"{made.id}\n"
    assert json.loads(run("train", "--detach", "--json", *small).stdout) == {"id": made.id}


@pytest.mark.parametrize(
    ("arguments", "needles"),
    [
        (["--set", "optimize.precison=bf16"], ["optimize.precison", "optimize.precision"]),
        (["--set", "optimize.precision=bf61"], ["bf61", "fp32 | bf16 | fp16", '"bf16"']),
        (["--set", "train.batch_size=0"], ["train.batch_size", ">= 1"]),
        (["--set", "model.name=storeis"], ["storeis", "stories"]),
        (["--set", "device.name=rtx-3060-12g"], ["rtx-3060-12gb"]),
        (["--set", "nonsense"], ["key=value"]),
        (["--preset", "limited-rom"], ["limited-ram"]),
        (["--plan", "/nowhere/plan.toml"], ["/nowhere/plan.toml"]),
        (["--set", "data.source=/nowhere/text"], ["/nowhere/text"]),
    ],
)
def test_bad_plans_are_one_clear_line(arguments: list[str], needles: list[str]) -> None:
    result = CliRunner().invoke(cli, ["plan", *arguments])
    assert isinstance(result.exception, PlanError), result.output
    message = str(result.exception)
    assert "\n" not in message
    for needle in needles:
        assert needle in message


@pytest.mark.parametrize(
    "arguments",
    [["--set", "device.name=cpu"], ["train"], ["resume", "latest"], ["runs", "delete", "latest"]],
)
def test_readonly_starts_and_changes_no_run(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train, "start", lambda *ignored, **named: pytest.fail("a run was launched"))
    result = run("--readonly", *arguments)
    assert result.exit_code == 2
    assert "--readonly" in result.output


@pytest.mark.parametrize(
    "arguments", [["attach"], ["--readonly", "attach"], ["attach", "--readonly"]]
)
def test_an_interrupt_ends_attach_and_not_the_run(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    create_run(Plan(), "watched")

    def followed(watched: RunDirectory, interrupts: train.Interrupts) -> int:
        signal.raise_signal(signal.SIGINT)
        return 0

    monkeypatch.setattr(train, "follow", followed)
    assert "Aborted" in run(*arguments).output


def test_doctor_says_that_the_folder_of_runs_is_read_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(dir: Path) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    found = {f["what"]: f for f in json.loads(run("doctor", "--json", "--no-steps").output)}
    assert found["runs"]["state"] == "warning"
    assert found["runs"]["found"].endswith("no file can be written: Read-only file system")


def test_doctor_lists_frameworks() -> None:
    result = run("doctor", "--json", "--no-steps")
    what = {finding["what"] for finding in json.loads(result.output)}
    assert {"torch backend", "jax backend", "terminal", "runs"} <= what


def test_doctor_says_what_is_wrong_with_the_folder_of_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "memconsole").write_text("in the way")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    found = {f["what"]: f for f in json.loads(run("doctor", "--json", "--no-steps").output)}
    assert found["runs"]["state"] == "warning"
    assert str(tmp_path) in found["runs"]["found"]


def test_a_home_of_nobody_is_a_message_and_no_traceback() -> None:
    assert "cannot be read" in str(run("plan", "--plan", "~nosuchuser/x.toml").exception)
    assert "nosuchuser" in (path_refusal()("~nosuchuser/x.toml") or "")


def test_who_asks_has_a_name_where_the_system_knows_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    assert user_name() == f"user {os.getuid()}"


def test_default_plan_needs_no_settings() -> None:
    assert run("plan", "--json").exit_code in (0, 3)
    assert catalog.architecture(Plan()).vocab_size > 256


def test_picking_a_model_or_dataset_drops_what_was_meant_for_the_last_one(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("once upon a time " * 50)
    result = run("plan", "--toml", "--set", "model.name=gpt2", "--set", f"data.source={tmp_path}")
    plan = loads(result.output)
    assert plan.model.target_params is None
    assert plan.data.max_examples is None
    kept = run("plan", "--toml", "--set", "data.max_examples=3", "--set", f"data.source={tmp_path}")
    assert loads(kept.output).data.max_examples == 3


def test_names_of_data_that_are_not_utf8_are_refused_as_such(tmp_path: Path) -> None:
    name = os.fsdecode(os.fsencode(tmp_path) + b"/m\xf6.txt")
    made = run("data", "make", "text", name, "--size", "1k")
    assert str(made.exception).endswith('m\\udcf6.txt": the name is not UTF-8; choose another')
    read = run("plan", "--set", f"data.source={name}")
    assert "expected UTF-8; rename the file or the folder" in str(read.exception)


def test_wherever_a_command_asks_y_answers() -> None:
    def options(command: click.Command) -> list[list[str]]:
        below = command.commands.values() if isinstance(command, click.Group) else ()
        return [p.opts for p in command.params] + [one for sub in below for one in options(sub)]

    context = click.Context(cli)
    commands = (cli.get_command(context, name) for name in COMMANDS)
    asking = [opts for one in commands if one for opts in options(one) if "--yes" in opts]
    assert len(asking) > 1
    assert all("-y" in opts for opts in asking)


def test_a_plan_starts_from_one_thing() -> None:
    for words in (["--preset", "stories"], ["--plan", "plan.toml"]):
        result = run("plan", "--from", "latest", *words)
        assert isinstance(result.exception, PlanError)
        assert f"{words[0]} and --from exclude each other" in str(result.exception)


@pytest.mark.parametrize("option", ["--ascii", "--slow-link", "--fast-link", "--readonly"])
def test_options_of_the_console_are_refused_where_none_opens(option: str) -> None:
    done = run(option, "runs")
    assert done.exit_code == 2
    assert f"{option} is for the console and for attach, not for runs" in done.output
    done = run(option)
    assert done.exit_code == 2
    assert f"{option} opens the console" in done.output


def test_data_settings_that_another_source_drops_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("one.txt", "two.txt", "held.txt"):
        Path(name).write_text("some words " * 200)
    settings = {"data.source": "one.txt", "data.validation": "held.txt", "data.max_examples": 3}
    Path("plan.toml").write_text(dumps(replace(Plan(), settings)))
    other = ("plan", "--plan", "plan.toml", "--set", "data.source=two.txt", "--toml")
    done = run(*other)
    assert "data.source = two.txt drops data.validation = " in done.stderr
    assert "data.max_examples = 3" in done.stderr
    kept = run(*other, "--set", "data.validation=held.txt", "--set", "data.max_examples=3")
    assert (kept.stderr, loads(kept.stdout).data.max_examples) == ("", 3)
    assert run("plan", "--set", "data.source=two.txt", "--toml").stderr == ""


def test_what_a_limit_leaves_of_the_data_is_told() -> None:
    assert "data python-stdlib, its first 25 examples" in run("plan").output
    rows = dict(launch_rows(catalog.default_plan(), check_launch(catalog.default_plan(), None)))
    assert rows["data"].startswith("python-stdlib, its first 25 examples · ")


def test_fit_prints_a_plan_file_or_json_and_not_both() -> None:
    done = run("fit", "--toml", "--json")
    assert done.exit_code == 2
    assert "--toml prints the fitted plan alone" in done.output


def test_a_file_that_may_not_be_used_ends_a_command_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(**_: object) -> None:
        raise PermissionError(13, "Permission denied", "/elsewhere/x")

    monkeypatch.setattr(cli, "main", refused)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    assert capsys.readouterr().err == "memconsole: /elsewhere/x: Permission denied\n"


def test_a_stop_of_a_run_that_has_just_ended_hides_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    train._ask_to_stop(create_run(Plan()))
    assert "is not running" in capsys.readouterr().err
