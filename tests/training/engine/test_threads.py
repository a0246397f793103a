"""`device.threads` sets how many threads compute."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from memconsole.plan.plan import Plan, replace
from memconsole_jax import devices as jax_devices
from memconsole_torch import devices as torch_devices


def test_torch_computes_with_the_threads_that_the_plan_names() -> None:
    before = torch.get_num_threads()
    try:
        plan = replace(Plan(), {"device.threads": 3})
        torch_devices.prepare(torch.device("cpu"), plan)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
        torch_devices.prepare(torch.device("cpu"), Plan())


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no affinity")
def test_jax_finds_as_many_cores_as_the_plan_names() -> None:
    def cores() -> tuple[int, int]:
        jax_devices.prepare(replace(Plan(), {"device.threads": 1, "device.name": "cpu"}))
        return len(os.sched_getaffinity(0)), len(os.sched_getaffinity(os.getpid()))

    here = len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(1) as apart:  # affinity belongs to a thread
        assert apart.submit(cores).result() == (1, here)
