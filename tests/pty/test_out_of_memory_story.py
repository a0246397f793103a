"""A run that really runs out of memory, on a real terminal: one key lists what helps, enter relaunches with it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from terminal import Terminal

from memconsole.tui.screens.base import HELD_SECONDS
from tests.shell import COMMAND, memconsole

ALLOWED_BYTES = 90 * 2**20
PLAN = {
    "model.target_params": 1_000_000, "data.vocab_size": 1024, "data.sequence_length": 64,
    "train.batch_size": 128, "train.max_steps": 1, "train.sample_tokens": 4, "device.name": "cpu",
    "device.memory_fraction": ALLOWED_BYTES / psutil.virtual_memory().total,
}  # fmt: skip
"""About 400 MiB by the estimate of either backend."""
SLOW = 180.0


def runs(env: dict[str, str]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(memconsole(env, "runs", "--json"))
    return found


@pytest.mark.timeout(600)
@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_one_key_relaunches_a_run_that_died_of_memory_and_it_finishes(
    backend: str, tmp_path: Path, environment: dict[str, str]
) -> None:
    pytest.importorskip(backend)
    (tmp_path / "text").mkdir()
    for n in range(12):
        (tmp_path / "text" / f"{n}.txt").write_text(
            f"the cat {n} sat on a mat while dogs ran. " * 90
        )
    plan = PLAN | {"backend": backend, "data.source": str(tmp_path / "text")}
    settings = [part for key, value in plan.items() for part in ("--set", f"{key}={value}")]
    console = Terminal([*COMMAND, *settings], environment, 100, 30)
    try:
        console.wait_for("does not fit|over|too", SLOW)
        console.press("l")
        console.wait_for("starts it", SLOW)
        console.press("enter")
        console.wait_for("again starts it anyway", SLOW)
        time.sleep(HELD_SECONDS)
        console.press("enter")
        console.wait_for("out of memory", SLOW)
        died = runs(environment)[0]
        assert died["state"] == "failed"
        report = json.loads(memconsole(environment, "report", died["id"], "--json"))
        assert report["verdict"]["reason"] == "out_of_memory", report["verdict"]
        helped = [r for r in report["remedies"] if r["fits"]]
        assert helped, report["remedies"]

        console.press("f")
        console.wait_for("relaunch with", SLOW)
        console.wait_for("✓ fits · ~.* · ×", SLOW)
        console.press("enter")
        console.wait_for("starts it", SLOW)
        console.press("enter")
        console.wait_for("✓ finished", SLOW)
    finally:
        console.close()
    found = {run["id"]: run for run in runs(environment)}
    (again,) = (run for key, run in found.items() if key != died["id"])
    assert again["state"] == "finished"
    made = json.loads(memconsole(environment, "report", again["id"], "--json"))
    for key, value in helped[0]["changes"].items():
        section, name = key.split(".")
        assert made["plan"][section][name] == value
    assert made["memory"]["measured"]["peak_bytes"] < report["memory"]["estimated"]["peak_bytes"]
