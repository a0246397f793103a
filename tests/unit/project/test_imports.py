"""Rooms import only what they may, measured in fresh interpreters."""

import subprocess
import sys

import pytest

FRAMEWORKS = ("torch", "jax", "flax", "optax", "numpy", "pandas", "datasets", "h5py", "grain")


def loaded_after(code: str) -> set[str]:
    """Top-level modules in a fresh interpreter after `code`."""
    script = f"{code}\nimport sys; print(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "module",
    [
        "memconsole.tui.app.console",
        "memconsole.start",
        "memconsole.cli.plans.plan",
        "memconsole.cli.runs.train",
        "memconsole.cli.runs.predict",
        "memconsole.cli.machine.doctor",
        "memconsole.runs.act.supervise.supervisor",
        "memconsole_trainer.trackers.__main__",
    ],
)
def test_console_and_trackers_never_load_a_framework(module: str) -> None:
    assert not loaded_after(f"import {module}") & set(FRAMEWORKS)


@pytest.mark.parametrize(
    "module", ["memconsole.cli.runs.train", "memconsole.cli.plans.plan", "memconsole.cli.runs.runs"]
)
def test_commands_never_load_textual(module: str) -> None:
    assert not loaded_after(f"import {module}") & {"textual", "rich"}


def test_help_loads_no_command() -> None:
    script = "from memconsole.cli.main import cli; cli.main(['--help'], standalone_mode=False)"
    loaded = loaded_after(
        f"import contextlib, io\nwith contextlib.redirect_stdout(io.StringIO()): {script}"
    )
    assert not loaded & {"textual", "rich", "msgspec", "psutil", *FRAMEWORKS}


def test_supervisor_is_small() -> None:
    loaded = loaded_after("import memconsole.runs.act.supervise.supervisor")
    assert not loaded & {"click", "textual", "rich", "psutil"}
