"""Runs through the commands, as a person at a shell: train, detach, stop, resume, report."""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.shell import COMMAND, memconsole, wait_for_step

SMALL = [
    "--set", "model.target_params=200000", "--set", "data.vocab_size=512",
    "--set", "data.sequence_length=32", "--set", "train.batch_size=4",
    "--set", "train.log_every=2", "--set", "train.sample_tokens=8",
    "--set", "data.max_examples=6", "--set", "device.name=cpu",
]  # fmt: skip


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_detached_run_survives_its_shell_and_stops_and_resumes(
    environment: dict[str, str], backend: str
) -> None:
    shell = subprocess.Popen(
        ["/bin/sh", "-c", 'exec_id=$("$@"); echo "$exec_id"; sleep 600', "sh", *COMMAND, "train",
         "--detach", "--set", f"backend={backend}", *SMALL, "--set", "train.max_steps=100000",
         "--set", "train.epochs=1000"],
        env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert shell.stdout is not None
    run = shell.stdout.readline().strip()
    assert run
    os.killpg(shell.pid, signal.SIGKILL)
    shell.wait()
    before = wait_for_step(environment, run, 10)
    wait_for_step(environment, run, before + 4)

    output = memconsole(environment, "stop", run, "--yes")
    assert "stopped" in output
    report = json.loads(memconsole(environment, "report", run, "--json"))
    assert report["verdict"]["reason"] == "stopped"
    stopped_at = report["steps"][-1]["step"]

    memconsole(environment, "resume", run)
    wait_for_step(environment, run, stopped_at + 4)
    memconsole(environment, "stop", run, "--yes")
    report = json.loads(memconsole(environment, "report", run, "--json"))
    assert report["attempts"] == 2
    steps = [s["step"] for s in report["steps"]]
    assert steps == sorted(set(steps))
    assert steps[-1] > stopped_at
    assert "Resuming from" in memconsole(environment, "logs", run)


def test_training_ends_in_a_summary_and_both_backends_tell_the_same_story(
    environment: dict[str, str],
) -> None:
    curves = []
    for backend in ("torch", "jax"):
        output = memconsole(
            environment, "train", "--set", f"backend={backend}", *SMALL,
            "--set", "train.max_steps=20", "--set", "train.log_every=1",
        )  # fmt: skip
        assert "TRAINING COMPLETE" in output
        assert "Final validation loss" in output
        assert "Unigram model's loss" in output
        report = json.loads(memconsole(environment, "report", "latest", "--json"))
        assert (report["verdict"]["reason"], report["backend"]) == ("finished", backend)
        assert report["attempts"] == 1
        assert "as set" not in memconsole(environment, "logs", "latest")  # the recipe's numbers
        assert report["evaluations"][-1]["loss"] < report["steps"][0]["loss"]
        assert report["memory"]["measured"]["peak_bytes"] > 0
        assert report["memory"]["estimated"]["peak_bytes"] > 0
        curves.append({s["step"]: s["loss"] for s in report["steps"]})
    assert list(curves[0]) == list(curves[1]) == list(range(1, 21))
    for step, loss in curves[0].items():
        assert curves[1][step] == pytest.approx(loss, rel=0.02)


def test_a_plan_that_does_not_fit_starts_nothing(environment: dict[str, str]) -> None:
    memconsole(environment, "train", "--set", "model.name=llama-3.1-8b",
               "--set", "train.batch_size=4096", code=3)  # fmt: skip
    assert json.loads(memconsole(environment, "runs", "--json")) == []


def test_a_catalog_device_is_refused_for_training(environment: dict[str, str]) -> None:
    memconsole(environment, "train", "--set", "device.name=tpu-v5e", code=2)
    assert json.loads(memconsole(environment, "runs", "--json")) == []


def test_a_plan_that_its_data_refuses_trains_nothing_and_says_so_everywhere(
    environment: dict[str, str], tmp_path: Path
) -> None:
    data = tmp_path / "words.parquet"
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.table({"body": ["some words", "some more of them"] * 20})
    pytest.importorskip("pyarrow.parquet").write_table(table, data)
    settings = (*SMALL, "--set", f"data.source={data}", "--set", "train.max_steps=2")
    memconsole(environment, "train", *settings, code=2)
    (run,) = json.loads(memconsole(environment, "runs", "--json"))
    assert "text_column" in run["refused"]
    listed = memconsole(environment, "runs")
    assert "refused" in listed
    assert run["refused"] in listed
    done = subprocess.run(
        [*COMMAND, "resume", run["id"]],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "trained nothing" in done.stderr
    assert "text_column" in done.stderr
    assert json.loads(memconsole(environment, "report", run["id"], "--json"))["attempts"] == 1
    # What it says to do is what helps.
    plan = next((tmp_path / "state").rglob("plan.toml"))
    assert str(plan) in done.stderr
    memconsole(environment, "train", "--plan", str(plan), "--set", "data.text_column=body")
    first, _ = json.loads(memconsole(environment, "runs", "--json"))
    assert (first["state"], first["refused"]) == ("finished", "")
