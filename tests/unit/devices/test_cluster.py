"""The partitions of a Slurm cluster, and the plan that trains in one."""

from __future__ import annotations

import threading

import pytest

from memconsole.devices import cluster
from memconsole.devices.cluster import Partition, Partitions, cards_like, parse
from memconsole.plan.plan import Plan, replace

SINFO = (
    "main|(null)|64|1-00:00:00|12\n"
    "gpu|gpu:h100:8(S:0-1)|96|2-00:00:00|4\n"
    "gpu|gpu:h100:4|48|2-00:00:00|1\n"
    "old|gpu:2|16|infinite|3\n"
    "damaged\n"
)


def test_partitions_are_read_with_their_cards() -> None:
    main, gpu, old = parse(SINFO)
    assert (main.gpus, main.cores, main.time_limit) == (0, "64", "1-00:00:00")
    assert (gpu.gpus, gpu.gpu_type, gpu.nodes) == (8, "h100", "4")
    assert gpu.words == "4 nodes with 8 × h100, 96 cores · limit 2-00:00:00"
    assert (old.gpus, old.gpu_type) == (2, "")


@pytest.mark.parametrize(
    ("gpu_type", "found"),
    [
        ("h100", ["h100-80gb"]),
        ("rtx3090", ["rtx-3090"]),
        ("nvidia_a100-sxm4-80gb", ["a100-80gb"]),
        ("a10", ["a10"]),
        ("a30", []),
        ("", []),
    ],
)
def test_a_clusters_name_of_a_card_is_found_in_the_catalog(gpu_type: str, found: list[str]) -> None:
    assert cards_like(gpu_type)[: len(found) or None] == found


def test_a_picked_partition_brings_its_device_unless_the_plan_has_one_of_that_kind() -> None:
    main, gpu, old = parse(SINFO)
    assert replace(Plan(), cluster.changes(Plan(), main)).device.name == "cpu"
    picked = replace(Plan(), cluster.changes(Plan(), gpu))
    assert picked.device.name == "h100-80gb"
    assert (picked.launch.on, picked.launch.partition) == ("slurm", "gpu")
    assert picked.launch.devices_per_node == 8
    mine = replace(Plan(), {"device.name": "rtx-3090"})
    assert replace(mine, cluster.changes(mine, old)).device.name == "rtx-3090"


def test_a_controller_that_does_not_answer_delays_nothing() -> None:
    answered = threading.Event()
    found = (Partition("gpu", 8, "h100", "96", "1", "4"),)

    def ask() -> tuple[Partition, ...]:
        answered.wait(10)
        return found

    partitions = Partitions(ask)
    assert partitions.latest(0.01) == ()
    answered.set()
    assert partitions.latest(10) == found


def test_without_slurm_there_are_no_partitions() -> None:
    assert cluster.ask_sinfo(("no-such-sinfo",)) == ()
    assert cluster.ask_sinfo(("false",)) == ()
