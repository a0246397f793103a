"""The GPU's kernel of the loss, interpreted on the CPU, against torch's own operations."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from memconsole_torch.techniques.activations import loss_kernel

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = """
import torch
from memconsole.plan.tasks.language import MASKED
from memconsole_torch.techniques.activations import fused_loss, loss_kernel

loss_kernel.BLOCK = 64  # several blocks a row
torch.manual_seed(0)
for dtype, tolerance in (torch.float32, 1e-6), (torch.bfloat16, 4e-3), (torch.float16, 1e-4):
    for cap in None, 5.0:
        for vocabulary, padding in (100, 28), (128, 0), (7, 57):
            for share in 0.25, torch.tensor(0.125):
                scores = (4 * torch.randn(9, vocabulary + padding)).to(dtype)
                targets = torch.randint(0, vocabulary, (9,))
                targets[3] = MASKED
                wanted = scores[:, :vocabulary].clone().float()
                nats = fused_loss._into_slopes(wanted, targets, share, True, cap)
                untouched = scores.clone()
                only = loss_kernel.into_slopes(untouched, targets, share, vocabulary, cap, False)
                assert torch.equal(untouched, scores)
                found = loss_kernel.into_slopes(scores, targets, share, vocabulary, cap, True)
                torch.testing.assert_close(found, nats, rtol=1e-5, atol=0)
                assert torch.equal(only, found)
                assert not scores[:, vocabulary:].any()
                slopes = scores[:, :vocabulary].float()
                torch.testing.assert_close(slopes, wanted, rtol=tolerance, atol=tolerance)
"""


def test_the_kernel_equals_torchs_operations() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={
            **os.environ,
            "TRITON_INTERPRET": "1",
            "PYTHONPATH": str(ROOT / "backends") + f":{ROOT}",
        },
        check=True,
    )


def test_without_triton_a_gpu_uses_torchs_operations_and_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu, cpu = torch.device("cuda", 0), torch.device("cpu")
    for installed in (True, False):
        monkeypatch.setattr(loss_kernel, "_installed", lambda found=installed: found)
        assert loss_kernel.runs_on(gpu) == installed
        assert not loss_kernel.runs_on(cpu)
        assert bool(loss_kernel.lines(gpu)) == (not installed)
        assert loss_kernel.lines(cpu) == []
