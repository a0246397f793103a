"""Which compiler of torch.compile this machine lacks."""

from __future__ import annotations

import pytest

from memconsole.plan.machine import compilers


def test_a_cpu_needs_a_cpp_compiler_and_a_gpu_needs_triton(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compilers.shutil, "which", lambda name: None)
    monkeypatch.setattr(compilers, "find_spec", lambda name: None)
    needed = {
        kind: compilers.missing_compiler(kind) for kind in ("cpu", "gpu", "rocm", "apple", "mps")
    }
    assert needed == {
        "cpu": "a C++ compiler (g++ or clang++)", "gpu": "triton", "rocm": "triton", "apple": "", "mps": "",
    }  # fmt: skip


def test_nothing_is_missing_where_a_compiler_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilers.shutil, "which", lambda name: name if name == "c++" else None)
    assert compilers.missing_compiler("cpu") == ""
