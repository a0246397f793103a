"""A run that goes on, and its evaluations, hold no more than the training did: real runs, measured."""

from __future__ import annotations

import json
from typing import Any

import pytest

from memconsole.units import MIB
from tests.shell import memconsole, wait_for_step

SETTINGS = {
    "device.name": "cpu",
    "model.target_params": 6_000_000,
    "data.vocab_size": 1024,
    "data.sequence_length": 64,
    "data.max_examples": 30,
    "train.batch_size": 2,
    "train.epochs": 10_000,
    "train.evaluate_every": 2,
    "train.evaluation_batches": 2,
    "train.log_every": 1,
    "train.sample_tokens": 8,
}
"""Weights, gradients and optimizer state are most of what it holds, and a second copy of any would show."""
NOISE = 10 * MIB
"""By which two attempts on a busy machine may differ; a second copy of the weights alone takes 23 MiB."""


def stopped_behind(env: dict[str, str], run: str, steps: int) -> dict[str, Any]:
    """The memory section of the report, once the present attempt has made so many steps and is stopped."""

    first = wait_for_step(env, run, 0)
    wait_for_step(env, run, first + steps)
    memconsole(env, "stop", run, "--yes")
    report = json.loads(memconsole(env, "report", run, "--json"))
    memory: dict[str, Any] = report["memory"]
    return memory


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_neither_a_resumed_run_nor_an_evaluation_needs_more_than_training(
    environment: dict[str, str], backend: str
) -> None:
    words = [part for key, value in SETTINGS.items() for part in ("--set", f"{key}={value}")]
    run = memconsole(environment, "train", "--detach", "--set", f"backend={backend}", *words)
    run = run.strip()
    before = stopped_behind(environment, run, 6)
    memconsole(environment, "resume", run)
    after = stopped_behind(environment, run, 6)
    trained = before["by_phase"]["train"]
    for memory in (before, after):
        for phase, peak in memory["by_phase"].items():
            assert peak <= trained + NOISE, (phase, memory)
    assert after["measured"]["peak_bytes"] <= before["measured"]["peak_bytes"] + NOISE
