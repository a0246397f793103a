"""From `plan --exact` to the real tracers and back: both backends, one tiny model each."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from memconsole.memory.answers.space import FREE

TINY = (
    "model.target_params=200_000", "data.sequence_length=32", "train.batch_size=2",
    "data.tokenizer=none", "data.vocab_size=512",
)  # fmt: skip


def command(*settings: str) -> list[str]:
    pairs = [part for setting in (*TINY, *settings) for part in ("--set", setting)]
    return [sys.executable, "-m", "memconsole", "plan", "--json", *pairs]


def environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "XDG_CACHE_HOME": str(folder), "OMP_NUM_THREADS": "1"}


def priced(folder: Path, *arguments: str) -> tuple[dict[str, Any], int, str]:
    done = subprocess.run(
        arguments, capture_output=True, text=True, env=environment(folder), timeout=240, check=False
    )
    assert done.stdout, done.stderr
    return json.loads(done.stdout), done.returncode, done.stderr


def consistent(found: dict[str, Any]) -> None:
    for phase, total in found["phases"].items():
        assert total == sum(c["phases"].get(phase, 0) for c in found["components"]), phase
    assert found["peak_bytes"] == max(found["phases"].values())
    low, high = found["band_bytes"]
    assert low <= found["device_bytes"] <= high


def test_torch_is_traced_for_a_card_that_is_not_here_and_kept(tmp_path: Path) -> None:
    card = command("device.name=rtx-4090")
    formula, _, _ = priced(tmp_path, *card)
    exact, status, said = priced(tmp_path, *card, "--exact")
    assert status == 0, said
    assert formula["tier"] == "~"
    assert (exact["tier"], exact["reserved_tier"], exact["device_tier"]) == ("=", "=", "~")
    assert "torch" in exact["source"]
    assert exact["exact_problem"] == ""
    assert exact["least_bytes"] <= exact["reserved_bytes"]
    consistent(exact)
    assert exact["peak_bytes"] == pytest.approx(formula["peak_bytes"], rel=0.15)
    weights = next(c for c in exact["components"] if c["name"] == "weights")
    assert weights["bytes"] == pytest.approx(4 * exact["parameters"], rel=0.05)
    assert weights["tier"] == "="
    kept = {path: path.stat().st_ino for path in tmp_path.rglob("*.json")}
    assert kept
    again, status, said = priced(tmp_path, *card, "--exact", "--timeout", "20")
    assert status == 0, said
    inodes = {path: path.stat().st_ino for path in tmp_path.rglob("*.json")}
    assert inodes == kept, "not traced again"
    assert again["peak_bytes"] == exact["peak_bytes"]
    # Other rows and lengths of the same structure come from the stored timeline.
    longer = command("device.name=rtx-4090", "data.sequence_length=48", "train.batch_size=3")
    from_store, status, _ = priced(tmp_path, *longer, "--exact")
    assert status == 0
    assert from_store["peak_bytes"] > exact["peak_bytes"]


def test_jax_is_compiled_for_this_processor(tmp_path: Path) -> None:
    here = command("backend=jax", "device.name=cpu")
    exact, status, said = priced(tmp_path, *here, "--exact")
    assert status == 0, said
    assert exact["tier"] == "="
    assert "XLA" in exact["source"]
    assert exact["caveat"]
    consistent(exact)
    weights = next(c for c in exact["components"] if c["name"] == "weights")
    assert weights["tier"] == "="
    activations = next(c for c in exact["components"] if c["name"] == "activations")
    assert activations["tier"] == "~", "one program tells no activations apart"


@pytest.mark.slow
def test_jax_is_fitted_by_what_its_compiler_says(tmp_path: Path) -> None:
    """Settings are changed only where the compiler's bytes of the plan do not fit, to some whose bytes do. The formula's
    band is wider than this plan is large, so that every free setting is compiled: only checkpointing is free."""
    here = command(
        "backend=jax", "device.name=cpu", "train.batch_size=8", "data.sequence_length=64"
    )
    kept = (row.key for row in FREE if row.key != "optimize.gradient_checkpointing")
    fitting = [*here[:3], "fit", *here[4:], *(part for key in kept for part in ("--keep", key))]
    given, _, _ = priced(tmp_path, *here, "--exact")
    budget = given["device_bytes"] - 2**20
    found, status, said = priced(tmp_path, *fitting, "--exact", "--budget", f"{budget}B")
    assert status == 0, said
    assert found["exact_problem"] == ""
    assert found["changes"]
    assert found["after"]["tier"] == "="
    assert found["after"]["device_bytes"] <= budget
    changes = (f"{c['key']}={str(c['after']).lower()}" for c in found["changes"])
    pairs = [part for change in changes for part in ("--set", change)]
    again, status, said = priced(tmp_path, *here, *pairs, "--exact")
    assert status == 0, said
    assert again["peak_bytes"] == found["after"]["peak_bytes"]


def test_what_cannot_be_had_is_said_with_the_formulas_numbers(tmp_path: Path) -> None:
    formula, _, _ = priced(tmp_path, *command())
    found, status, said = priced(tmp_path, *command(), "--exact", "--timeout", "0.01")
    assert status == 1
    assert "not exact" in said
    assert found["exact_problem"]
    assert found["tier"] == "~"
    assert found["peak_bytes"] == formula["peak_bytes"]


def test_ctrl_c_ends_the_waiting_and_the_tracer(tmp_path: Path) -> None:
    import psutil

    waiting = psutil.Popen(
        [*command("device.name=rtx-3090"), "--exact"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(tmp_path),
    )  # fmt: skip
    end = time.monotonic() + 60
    tracers: list[psutil.Process] = []
    while not tracers and time.monotonic() < end:
        time.sleep(0.02)
        tracers = [p for p in waiting.children() if "memconsole_torch.tracing.trace" in _words(p)]
    assert tracers
    waiting.send_signal(signal.SIGINT)
    output, said = waiting.communicate(timeout=60)
    assert waiting.returncode == 1
    assert "interrupted" in said
    assert "Traceback" not in said
    assert json.loads(output)["tier"] == "~"
    _, alive = psutil.wait_procs(tracers, timeout=10)
    assert not alive


def _words(process: Any) -> list[str]:
    import psutil

    try:
        return list(process.cmdline())
    except psutil.Error:
        return []
