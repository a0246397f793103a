"""The Triton kernels, interpreted on the CPU, against torch's own operations."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from memconsole_torch.kernels import launch
from memconsole_torch.kernels.adamw import BLOCKS, TINY
from memconsole_trainer.techniques.blockwise import HALF

ROOT = Path(__file__).resolve().parents[3]
LOSS = """
import torch
from memconsole.plan.tasks.language import MASKED
from memconsole_torch.kernels import loss
from memconsole_torch.techniques.activations import fused_loss

loss.BLOCK = 64  # several blocks a row
torch.manual_seed(0)
for dtype, tolerance in (torch.float32, 1e-6), (torch.bfloat16, 4e-3), (torch.float16, 5e-4):
    for cap in None, 5.0:
        for vocabulary, padding in (100, 28), (128, 0), (7, 57):
            for share in 0.25, torch.tensor(0.125), torch.linspace(-1, 1, 9)[:, None]:
                scores = (4 * torch.randn(9, vocabulary + padding)).to(dtype)
                targets = torch.randint(0, vocabulary, (9,))
                targets[3] = MASKED
                wanted = scores[:, :vocabulary].clone().float()
                each, own = torch.empty(9), torch.empty(9)
                nats = fused_loss._in_place_cross_entropy(wanted, targets, share, True, cap, each)
                untouched = scores.clone()
                only = loss.in_place_cross_entropy(untouched, targets, share, vocabulary, cap, False, own)
                torch.testing.assert_close(own, each, rtol=1e-5, atol=1e-6)
                assert torch.equal(untouched, scores)
                found = loss.in_place_cross_entropy(scores, targets, share, vocabulary, cap, True)
                torch.testing.assert_close(found, nats, rtol=1e-5, atol=0)
                assert torch.equal(only, found)
                assert not scores[:, vocabulary:].any()
                slopes = scores[:, :vocabulary].float()
                torch.testing.assert_close(slopes, wanted, rtol=tolerance, atol=tolerance)
"""
ADAMW = """
import torch
from memconsole_torch.kernels import launch
from memconsole_torch.techniques.optimizer.quantized_adam import QuantizedAdamW

torch.manual_seed(0)
for size in 5000, 4096, 100:
    for live in 1.0, torch.tensor(1.0), torch.tensor(0.0):
        start = torch.randn(size)
        weights, rules = [], []
        for _ in range(2):
            p = torch.nn.Parameter(start.clone())
            groups = [{"params": [p], "lr": 0.01, "weight_decay": 0.1}]
            rules.append(QuantizedAdamW(groups, (0.9, 0.95), 1e-8, [p] if size > 100 else []))
            weights.append(p)
        for step in range(4):
            gradient = torch.randn(size) * 10.0 ** torch.randint(-9, 1, (size,))
            gradient[512:768] = 0.0  # a block whose scales are 0
            for i, (p, rule) in enumerate(zip(weights, rules)):
                p.grad = gradient.clone()
                rule.param_groups[0]["live"] = live if step == 2 else 1.0
                launch.runs_on = lambda device, own=bool(i): own
                rule.step()
        states = [next(iter(rule.state.values())) for rule in rules]
        for name, wanted in states[0].items():
            found = states[1][name]
            if wanted.dtype == torch.uint8:
                # Sums are rounded otherwise, so that a number near the middle of two codes may get the other one.
                apart = (found.int() - wanted.int()).abs()
                assert apart.max() <= 1 and (apart > 0).float().mean() < 0.01, (name, apart.max())
            else:
                torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-12)
        torch.testing.assert_close(weights[1], weights[0], rtol=1e-4, atol=1e-5)
"""
ROUNDING = """
import torch
from memconsole_torch.kernels import launch, rounding
from memconsole_torch.techniques.optimizer.stochastic import round_into

torch.manual_seed(0)
for size, start in (5000, 0), (4096, 2**22), (1, 1024):
    for key in (1, 2), (2**32 - 1, 2**31), (123456789, 3987654321):
        wide = torch.randn(size) * 10.0 ** torch.randint(-30, 30, (size,))
        found, wanted = (torch.empty(size, dtype=torch.bfloat16) for _ in range(2))
        rounding.round_into(found, wide.clone(), key, start)
        round_into(wanted, wide.clone(), key, start)
        assert torch.equal(found, wanted)
"""
DECODING = """
import numpy as np
import torch
from memconsole_torch.kernels import decoding
from memconsole_torch.models.codes import _pairs, decoded
from memconsole_trainer.techniques.base_storage import quantize

for storage in "int8", "nf4":
    for shape in (70, 65), (64, 128):
        matrix = np.random.default_rng(0).standard_normal(shape, np.float32)
        codes, scales = map(torch.from_numpy, quantize(matrix, storage))
        for dtype in torch.float32, torch.bfloat16, torch.float16:
            found = torch.empty(len(codes), 64, dtype=dtype)
            decoding.decode(codes, scales, _pairs(codes.device), found)
            wanted = decoded(codes, scales, shape, dtype)
            found = found.view(-1)[: wanted.numel()].view(shape)
            # Triton's interpreter cuts numbers off where a GPU rounds them to bf16.
            nearly = {"rtol": 2**-7, "atol": 0} if dtype == torch.bfloat16 else {"rtol": 0, "atol": 0}
            torch.testing.assert_close(found, wanted, **nearly)
"""


@pytest.mark.parametrize(
    "comparison", [LOSS, ADAMW, ROUNDING, DECODING], ids=["loss", "adamw", "rounding", "decoding"]
)
def test_a_kernel_equals_torchs_operations(comparison: str) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    subprocess.run(
        [sys.executable, "-c", comparison],
        env={
            **os.environ,
            "TRITON_INTERPRET": "1",
            "PYTHONPATH": str(ROOT / "backends") + f":{ROOT}",
        },
        check=True,
    )


FLOATS = ("cap", "first_share", "second_share", "epsilon", "decay", "step_size")
WIDE = ("weight", "gradient", "nats", "factor", "pairs")
TYPES = {
    "targets": "*i64",
    "words": "*i32",
    "target": "*i16",
    "first": "*u8",
    "second": "*u8",
    "codes": "*u8",
}
CONSTANTS: dict[str, dict[str, Any]] = {
    "cross_entropy": {
        "capped": True,
        "with_gradient": True,
        "one_factor": False,
        "masked": -100,
        "block": 1024,
    },
    "adamw": {
        "factors_on_device": False,
        "quantized": True,
        "half": HALF,
        "tiny": TINY,
        "blocks": BLOCKS,
        "block": 256,
    },
    "round_stochastically": {"block": 1024, "lanes": 256, "counters": 1024},
    "dequantize": {"paired": True, "blocks": 32, "block": 64},
}


def _type(name: str, narrow: str) -> str:
    if name in ("scores", "out"):
        return narrow
    if name in TYPES:
        return TYPES[name]
    if name.endswith("_lookup"):
        return "*u8"
    if name in WIDE or name.endswith(("_scales", "_values")) or name == "scales":
        return "*fp32"
    return "fp32" if name in FLOATS else "i32"


@pytest.mark.parametrize("narrow", ["*bf16", "*fp16"])
@pytest.mark.parametrize("target", [("cuda", 75, 32), ("cuda", 90, 32), ("hip", "gfx942", 64)])
def test_kernels_compile_for_gpus_that_are_not_here(
    target: tuple[str, Any, int], narrow: str
) -> None:
    triton = pytest.importorskip("triton", reason="Triton is not installed")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    for name, constants in CONSTANTS.items():
        found = launch._kernel(name)
        names = found.arg_names
        types = {n: "constexpr" if n in constants else _type(n, narrow) for n in names}
        values = {(names.index(n),): value for n, value in constants.items()}
        compiled = triton.compile(ASTSource(found, types, values, {}), target=GPUTarget(*target))
        assert compiled.asm


@pytest.mark.parametrize(
    ("installed", "capability", "missing"),
    [(True, (9, 0), ""), (True, (6, 1), "as old as this"), (False, (9, 0), "not installed")],
)
def test_where_triton_does_not_run_a_gpu_uses_torchs_operations_and_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, installed: bool, capability: tuple[int, int], missing: str
) -> None:
    gpu, cpu = torch.device("cuda", 0), torch.device("cpu")
    launch._missing.cache_clear()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if installed else None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert launch.runs_on(gpu) == (not missing)
    assert not launch.runs_on(cpu)
    assert [missing in line for line in launch.lines(gpu)] == [True] * bool(missing)
    assert launch.lines(cpu) == []
    launch._missing.cache_clear()


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ({}, "{root}/memconsole/triton"),
        ({"TRITON_CACHE_DIR": "/mine"}, "/mine"),
        ({"TRITON_HOME": "/mine"}, None),
    ],
)
def test_what_triton_compiles_is_kept_in_our_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, own: dict[str, str], expected: str | None
) -> None:
    for name in ("TRITON_CACHE_DIR", "TRITON_HOME"):
        monkeypatch.setenv(name, "")  # so that it is as it was afterwards
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    launch._kernel.cache_clear()
    monkeypatch.setattr(importlib, "import_module", lambda name: SimpleNamespace(adamw=1))
    launch._kernel("adamw")
    launch._kernel.cache_clear()
    found = os.environ.get("TRITON_CACHE_DIR")
    assert found == (expected and expected.format(root=tmp_path))
