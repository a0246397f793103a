"""A trainer that the kernel kills for lack of memory is told from one that someone killed."""

from __future__ import annotations

import os
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from run_story import SUPERVISE, TRAINER, Story

from memconsole.runs.act import launch
from memconsole.runs.read.life.liveness import liveness


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A memory cgroup of 150 MiB that processes can be put into."""
    name = f"memconsole-{uuid.uuid4().hex[:8]}"
    for base, limit in (
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
        (Path("/sys/fs/cgroup"), "memory.max"),
    ):
        group = base / name
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            (group / limit).write_text(str(150 << 20))
        except OSError:
            group.rmdir()
            continue
        yield group
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            try:
                group.rmdir()
                return
            except OSError:
                time.sleep(0.1)
        return
    pytest.skip("needs the right to make a memory cgroup")


def test_a_kill_for_lack_of_memory_is_named_with_its_evidence(
    story: Story, small_group: Path
) -> None:
    trainer = story.folder / "trainer.py"
    trainer.write_text(
        TRAINER.replace("EACH_STEP", "step == 5 and bytearray(os.urandom(1) * (1 << 30))")
    )
    inside = f'echo $$ > {small_group}/cgroup.procs && exec "$@"'
    launch.start_supervisor(
        story.run,
        "--start",
        ["sh", "-c", inside, "sh", sys.executable, "-P", "-c", SUPERVISE, str(trainer)],
    )
    story.wait(lambda: story.state == "failed")
    why = liveness(story.run).verdict
    assert why is not None
    assert (why.reason, why.signal) == ("host_out_of_memory", "SIGKILL")
    assert "oom_kill 0 → 1" in why.evidence
    assert "step 5" in why.evidence
    assert os.path.exists(story.run.attempt_path(1) / "exit.json")
