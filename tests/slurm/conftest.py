"""Tests against a real Slurm: only `make test-slurm` collects them, and each starts no cluster of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from cluster import Cluster, cluster, missing

collect_ignore_glob = [] if os.environ.get("MEMCONSOLE_TEST_SLURM") else ["test_*.py"]


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster of two nodes on this machine; its commands work in this process and its children."""
    absent = missing()
    if absent:
        pytest.fail(
            f"not installed: {', '.join(absent)}; apt install slurmctld slurmd slurm-client munge"
        )
    with cluster(tmp_path_factory.mktemp("slurm")) as made:
        os.environ |= made.environment
        yield made
