"""A user without a home folder, as in some containers: plans work, and what needs the folder says so in one line."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from memconsole import user_folders
from memconsole.plan.plan import Plan, replace
from memconsole.runs.act.launch import launch
from memconsole.runs.record.directory import RunError
from memconsole.runs.record.run_store import list_runs
from memconsole.tui.keys.keymap import read_keymap

FOLDERS = ("XDG_STATE_HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "HF_HOME", "HF_HUB_CACHE")

HOMELESS = """
import pwd, sys
pwd.getpwuid = {}.__getitem__
sys.argv[0] = "memconsole"
from memconsole.cli.main import main
main()
"""


def homeless(*arguments: str, home: str | None = None) -> subprocess.CompletedProcess[str]:
    """A command of a user whom the system does not know, with this HOME."""
    environment = {key: value for key, value in os.environ.items() if key not in (*FOLDERS, "HOME")}
    if home is not None:
        environment["HOME"] = home
    argv = [sys.executable, "-c", HOMELESS, *arguments]
    return subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("home", [None, "", "relative"])
def test_commands_about_runs_ask_for_a_home_in_one_line(home: str | None) -> None:
    done = homeless("runs", home=home)
    assert (done.returncode, done.stderr) == (
        2,
        "memconsole: no home folder: set HOME or XDG_STATE_HOME\n",
    )


@pytest.mark.parametrize(
    "command",
    [
        ("plan", "--set", "device.name=cpu", "--set", "model.name=gpt2"),
        ("doctor", "--no-steps"),
        ("keys",),
    ],
)
def test_what_needs_no_folder_works_without_one(command: tuple[str, ...]) -> None:
    done = homeless(*command)
    assert done.returncode in (0, 3), done.stderr
    assert "Traceback" not in done.stderr


def test_a_run_needs_a_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere(name: str) -> Path:
        raise RuntimeError("no home")

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("platformdirs.user_cache_path", nowhere)
    with pytest.raises(user_folders.NoHomeError, match="set HOME or XDG_CACHE_HOME"):
        user_folders.cache_folder()
    with pytest.raises(RunError, match="set HOME or XDG_CACHE_HOME"):
        launch(replace(Plan(), {"device.name": "cpu"}))
    assert list_runs() == []


def test_the_keys_are_the_built_in_ones_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    assert not read_keymap().there
