"""The console starts light."""

from __future__ import annotations

import subprocess
import sys

HEAVY = ("torch", "jax", "flax", "numpy", "pandas", "pyarrow", "transformers", "datasets", "grain")


def loaded(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint(' '.join(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    return set(done.stdout.split())


def test_the_console_loads_nothing_heavy() -> None:
    modules = loaded("import memconsole.tui.app.console, memconsole.tui.run.screen")
    assert not {name for name in HEAVY if name in modules}
    assert "memconsole_trainer" not in modules


def test_screens_are_loaded_when_opened() -> None:
    modules = loaded("import memconsole.tui.app.console")
    assert "memconsole.tui.plan.screen" in modules
    assert "memconsole.runs.read.follow" not in modules
    for later in ("run.screen", "runs.screen", "screens.devices", "screens.help", "screens.pick"):
        assert f"memconsole.tui.{later}" not in modules


def test_the_commands_do_not_load_textual() -> None:
    assert "textual" not in loaded("import memconsole.cli.main")
