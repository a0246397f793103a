"""For every test: a state folder of its own, one thread (fastest for tiny models), plain signals."""

import os
import signal
import tempfile
from collections.abc import Iterator

import pytest
from hypothesis import settings
from later import LATER

os.environ.setdefault("OMP_NUM_THREADS", "1")
# The same examples each time; `make soak` looks for new ones.
settings.register_profile("fixed", derandomize=True, deadline=None)
settings.register_profile("searching", deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))
for name in ("NO_COLOR", "SSH_CONNECTION"):
    os.environ.pop(name, None)
# Under nohup, or in the background of a shell, these are ignored, and children would inherit that.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="session")
def own_state_folder() -> Iterator[None]:
    """No test sees, or adds to, the runs of the person who starts it."""
    before = os.environ.get("XDG_STATE_HOME")
    with tempfile.TemporaryDirectory(prefix="memconsole-tests-") as folder:
        os.environ["XDG_STATE_HOME"] = folder
        yield
    if before is None:
        os.environ.pop("XDG_STATE_HOME")
    else:
        os.environ["XDG_STATE_HOME"] = before


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what is left to `make soak`."""
    files = {item.path.name for item in items}
    whole = not any("::" in argument for argument in config.args)
    for start in LATER:
        found = [item for item in items if item.nodeid.removeprefix("tests/").startswith(start)]
        if whole and not found and start.partition("::")[0].rpartition("/")[2] in files:
            raise pytest.UsageError(f"tests/later.py names no test: {start}")
        for item in found:
            item.add_marker(pytest.mark.slow)
