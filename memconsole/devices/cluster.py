"""The partitions of a Slurm cluster that this machine submits to."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from memconsole.plan import catalog
from memconsole.plan.plan import Plan
from memconsole.sanitize import clean_line
from memconsole.slurm_command import SlurmError, output_of

SINFO = ("sinfo", "--noheader", "--format=%R|%G|%c|%l|%D")
TIMEOUT_SECONDS = 10.0
FRESH_SECONDS = 60.0
_GRES = re.compile(r"gpu(?::(?P<type>[^:(,]+))?:(?P<count>\d+)")
_SERIES = re.compile(r"rtx|gtx|geforce|nvidia|tesla")
_WORD = re.compile(r"[a-z]*\d+[a-z]*")
_MEMORY = re.compile(r"\d+gb")


@dataclass(frozen=True)
class Partition:
    """A partition, by its smallest nodes."""

    name: str
    gpus: int
    gpu_type: str
    """The cluster's name for the GPU; "" if it does not say."""
    cores: str
    time_limit: str
    nodes: str

    @property
    def words(self) -> str:
        cards = f"{self.gpus} × {self.gpu_type or 'GPU'}, " if self.gpus else ""
        return f"{self.nodes} nodes with {cards}{self.cores} cores · limit {self.time_limit}"


def parse(output: str) -> tuple[Partition, ...]:
    """The partitions in the output of `SINFO`; if a partition has several kinds of nodes, the first one counts."""
    partitions: dict[str, Partition] = {}
    for line in output.splitlines():
        words = [clean_line(word.strip(), 100) for word in line.split("|")]
        if len(words) != 5 or not words[0]:
            continue
        name, gres, cores, limit, nodes = words
        cards = _GRES.search(gres)
        count, kind = (int(cards["count"]), cards["type"] or "") if cards else (0, "")
        partitions.setdefault(name, Partition(name, count, kind, cores, limit, nodes))
    return tuple(partitions.values())


def changes(plan: Plan, partition: Partition) -> dict[str, object]:
    """The settings by which `plan` trains in a partition, on the cards that its nodes have."""
    settings: dict[str, object] = {"launch.on": "slurm", "launch.partition": partition.name}
    if not partition.gpus:
        return settings | {"device.name": "cpu", "launch.devices_per_node": None}
    settings["launch.devices_per_node"] = partition.gpus
    like = cards_like(partition.gpu_type)
    if like and plan.device.name not in like:
        settings["device.name"] = like[0]
    return settings


def cards_like(gpu_type: str) -> list[str]:
    """The catalog's devices that a cluster may mean by a type such as h100, rtx3090 or
    nvidia_a100-sxm4-80gb; those whose memory it names first."""
    words = _numbered(gpu_type)
    matches = []
    for name in catalog.devices():
        own = _numbered(name)
        product = {word for word in own if not _MEMORY.fullmatch(word)}
        if product and product <= words:
            matches.append((not own <= words, name))
    return [name for _, name in sorted(matches, key=lambda match: match[0])]


def _numbered(name: str) -> set[str]:
    """The words of a product's name that have digits, without the series."""
    return set(_WORD.findall(_SERIES.sub(" ", name.lower())))


def ask_sinfo(command: Sequence[str] = SINFO) -> tuple[Partition, ...]:
    """The cluster's partitions; none if there is no cluster or it does not answer."""
    try:
        return parse(output_of(command, TIMEOUT_SECONDS))
    except SlurmError:
        return ()


class Partitions:
    """Keeps the newest list, and reads it in a thread, so that a slow controller delays no screen."""

    def __init__(self, ask: Callable[[], tuple[Partition, ...]] = ask_sinfo) -> None:
        self._ask = ask
        self._answered = threading.Event()
        self._fresh_until = float("-inf")
        self.known: tuple[Partition, ...] = ()
        """The partitions known by now."""

    def latest(self, patience_seconds: float = 0.0) -> tuple[Partition, ...]:
        """The partitions known by now. Reads them anew if they are old, and waits a moment for that."""
        now = time.monotonic()
        if now >= self._fresh_until:
            self._fresh_until = now + FRESH_SECONDS
            self._answered.clear()
            threading.Thread(target=self._refresh, daemon=True).start()
        self._answered.wait(patience_seconds)
        return self.known

    def _refresh(self) -> None:
        self.known = self._ask()
        self._answered.set()


PARTITIONS = Partitions()
