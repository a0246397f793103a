"""Fixtures of the tests of the trainers."""

from __future__ import annotations

import contextlib
import functools
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.shell import end_runs

WORDS = ["the", "cat", "sat", "on", "a", "mat", "while", "dogs", "ran", "over", "green", "hills"]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dozen small documents: 10 steps an epoch, the last one ragged."""
    folder = tmp_path_factory.mktemp("text")
    source = random.Random(1)
    for number in range(12):
        words = (source.choice(WORDS) for _ in range(110))
        (folder / f"{number:02d}.txt").write_text(" ".join(words))
    return folder


@pytest.fixture
def moving(monkeypatch: pytest.MonkeyPatch) -> None:
    """State really moves, between two parts of the same memory."""
    import torch

    from memconsole_jax.compiled import offload as jax_offload
    from memconsole_torch.techniques.optimizer import offload as torch_offload

    monkeypatch.setattr(torch_offload, "same_memory", lambda device: False)
    monkeypatch.setattr(jax_offload, "same_memory", lambda kind: False)
    pinless = lambda self, tensor: torch.empty_like(tensor).copy_(tensor)  # noqa: E731
    if not torch.cuda.is_available():
        monkeypatch.setattr(torch_offload.HostState, "_host_copy", pinless)


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Of commands whose runs are the test's own, and end with it."""
    env = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")}
    yield env
    end_runs(env)


@pytest.fixture(autouse=True, scope="session")
def _matmul_with_eigen() -> None:
    """XLA computes as in a run, whichever test opens JAX's devices first: it reads its flags only then."""
    with contextlib.suppress(ImportError):
        from memconsole_jax.devices import matmul_with_eigen

        matmul_with_eigen()


@pytest.fixture(autouse=True, scope="session")
def _compile_late() -> Iterator[None]:
    """Engines of JAX compile their programs of a step, an evaluation and a sample on first use: few tests need all."""
    with pytest.MonkeyPatch.context() as patch:
        with contextlib.suppress(ImportError):
            from memconsole_jax.compiled import compiling
            from memconsole_jax.compiled.programs import Programs
            from memconsole_jax.tasks.sampling import TokenSampler

            whole = compiling.compile_all
            train, evaluate = Programs.lower_train, Programs.lower_evaluate

            def train_late(programs: Programs) -> Any:
                # A step in parts takes its parts from what is lowered.
                late = not programs.keeps_state_on_host
                return Late(lambda: train(programs)) if late else train(programs)

            def compile_late(programs: Programs) -> compiling.Compiled:
                with pytest.MonkeyPatch.context() as meanwhile:
                    meanwhile.setattr(Programs, "lower_train", train_late)
                    meanwhile.setattr(
                        Programs, "lower_evaluate", lambda p: Late(lambda: evaluate(p))
                    )
                    return whole(programs)

            patch.setattr(compiling, "compile_all", compile_late)
            # A sampler compiles what was not prepared.
            patch.setattr(TokenSampler, "prepare", lambda sampler, tokens: lambda: None)
        yield


class Late:
    """A lowered or compiled program that is made on first use."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._made = functools.cache(make)

    def compile(self) -> Late:
        return Late(lambda: self._made().compile())

    def __call__(self, *arguments: Any) -> Any:
        return self._made()(*arguments)

    def memory_analysis(self) -> Any:
        return self._made().memory_analysis()
