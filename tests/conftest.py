"""For every test: folders of the session's own for state, caches and settings, one thread, plain signals."""

import gc
import os
import signal
import tempfile
from collections import defaultdict
from collections.abc import Generator
from importlib.metadata import version

import pytest
from hypothesis import settings
from later import LATER, MACHINE

os.environ.setdefault("OMP_NUM_THREADS", "1")
# XLA makes the same buffers and the same arithmetic in an eighth of the time; `make soak` runs the
# tests of the trainers on programs that are optimized as those of a run are.
QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
if version("jaxlib").startswith("0.10."):  # another version may abort at these flags
    QUICK += " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
os.environ.setdefault("XLA_FLAGS", QUICK)
# Tracing makes many objects that live until the test ends; to look for garbage among them is in vain.
gc.set_threshold(50_000)
# A few examples, the same each time; `make soak` looks for new ones.
settings.register_profile("fixed", max_examples=20, derandomize=True, deadline=None)
settings.register_profile("searching", max_examples=150, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))
for name in ("NO_COLOR", "SSH_CONNECTION"):
    os.environ.pop(name, None)
# Under nohup, or in the background of a shell, these are ignored, and children would inherit that.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)


OWN_FOLDERS = pytest.StashKey[tempfile.TemporaryDirectory[str]]()


def pytest_configure(config: pytest.Config) -> None:
    """Give the session folders of its own, which its workers share.

    No test sees, or adds to, the runs, caches and settings of the person who starts it. XLA's programs are
    all kept, so that a session compiles each of them once.
    """
    if hasattr(config, "workerinput"):
        return
    config.stash[OWN_FOLDERS] = tempfile.TemporaryDirectory(
        prefix="memconsole-tests-", ignore_cleanup_errors=True
    )
    folder = config.stash[OWN_FOLDERS].name
    os.environ |= {
        "XDG_STATE_HOME": f"{folder}/state",
        "XDG_CACHE_HOME": f"{folder}/cache",
        "XDG_CONFIG_HOME": f"{folder}/config",
        "HF_DATASETS_CACHE": f"{folder}/tables",
        "JAX_COMPILATION_CACHE_DIR": f"{folder}/xla",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


def pytest_unconfigure(config: pytest.Config) -> None:
    if OWN_FOLDERS in config.stash:
        config.stash[OWN_FOLDERS].cleanup()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Import the tests without looking for garbage, and spare each later search the objects of what is imported."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what is left to `make soak` and to `make accuracy`."""
    of_file = defaultdict[str, list[tuple[str, pytest.Item]]](list)
    for item in items:
        name = item.nodeid.removeprefix("tests/")
        of_file[name.partition("::")[0]].append((name, item))
    whole = not any("::" in argument for argument in config.args)
    marks = [(start, pytest.mark.slow) for start in LATER]
    marks += [(start, pytest.mark.machine) for start in MACHINE]
    for start, mark in marks:
        file = start.partition("::")[0]
        found = [item for name, item in of_file.get(file, ()) if name.startswith(start)]
        if whole and not found and file in of_file:
            raise pytest.UsageError(f"tests/later.py names no test: {start}")
        for item in found:
            item.add_marker(mark)


@pytest.fixture(autouse=True, scope="module")
def _collect_only_new_garbage() -> None:
    """Hide objects of earlier modules from the garbage collector: a build of an engine collects twice, and what a
    framework keeps of its programs is large."""
    gc.collect()
    gc.freeze()
