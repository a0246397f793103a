"""`memconsole doctor` trains on each device that it finds and says what works."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from memconsole.cli.machine import device_steps
from memconsole.devices.reading import DeviceReading, Devices, Missing

NO_NUMBER = Missing("not needed")


def device(name: str, kind: str) -> DeviceReading:
    return DeviceReading(
        id=name,
        name=name,
        kind=kind,
        memory_label="VRAM",
        total_bytes=NO_NUMBER,
        used_bytes=NO_NUMBER,
        free_bytes=NO_NUMBER,
        utilization_percent=NO_NUMBER,
        temperature_celsius=NO_NUMBER,
        power_watts=NO_NUMBER,
    )


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_a_real_step_is_trained_on_the_cpu(backend: str) -> None:
    pytest.importorskip(backend)
    found = list(device_steps.findings(backend, "cpu"))
    assert {what for what, _, _ in found} == {f"{backend} on cpu"}
    states = {words.partition(":")[0]: state for _, state, words in found}
    assert states["training step"] == states["bf16"] == "ok", found
    assert "loss" in found[0][2]


def test_a_device_that_is_not_there_is_a_finding() -> None:
    pytest.importorskip("torch")
    ((what, state, words),) = device_steps.findings("torch", "cuda:7")
    assert (what, state) == ("torch on cuda:7", "missing")
    assert "torch finds 0" in words


def test_a_crash_and_silence_are_findings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    monkeypatch.setattr(sys, "executable", str(python))
    python.write_text("#!/bin/sh\necho no driver >&2\nkill -SEGV $$\n")
    python.chmod(0o700)
    ((_, state, words),) = device_steps.findings("torch", "cpu")
    assert (state, words) == ("missing", "ended with code -11: no driver")
    python.write_text("#!/bin/sh\necho OSError: no library >&2\nexit 1\n")
    ((_, state, words),) = device_steps.findings("torch", "cpu")
    assert (state, words) == ("missing", "ended with code 1: OSError: no library")
    python.write_text("#!/bin/sh\nexec sleep 30\n")
    monkeypatch.setattr(device_steps, "LIMIT_SECONDS", 0.5)
    ((_, state, words),) = device_steps.findings("torch", "cpu")
    assert state == "missing"
    assert "no answer" in words


def test_a_backend_is_tried_on_the_devices_of_its_framework() -> None:
    pytest.importorskip("torch")
    seen = Devices(devices=(device("cpu", "cpu"), device("tpu:0", "tpu")))
    assert ("torch", "cpu") in device_steps.trials(seen)
    assert ("torch", "tpu:0") not in device_steps.trials(seen)


def test_a_framework_that_does_not_tell_its_devices_is_tried_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device_steps, "framework_of", lambda backend: None)
    seen = Devices(devices=(device("cpu", "cpu"), device("tpu:0", "tpu")))
    assert device_steps.trials(seen) == [("torch", "cpu"), ("jax", "cpu")]


def test_the_command_prints_steps_of_every_backend() -> None:
    pytest.importorskip("torch")
    done = subprocess.run(
        [sys.executable, "-m", "memconsole", "doctor", "--json"],
        capture_output=True,
        check=False,
    )
    found = json.loads(done.stdout)
    assert done.returncode == 0
    assert any(f["what"] == "torch on cpu" and f["state"] == "ok" for f in found)
