"""`device.memory_fraction` on a CPU: what the trainer may allocate for its model and its steps.

A GPU's allocator has a setting for it. A process has the kernel's limit on private writable memory
(setrlimit(2), RLIMIT_DATA; anonymous mappings count since Linux 4.7), beyond which an allocation fails as
an error that can be told, while memory that the machine really lacks ends the process by SIGKILL.
"""

from __future__ import annotations

import contextlib

from memconsole.plan.plan import Plan
from memconsole_trainer.engine import Engine

MAPPED_BYTES = 64 * 2**20
"""What may be mapped beside what is filled, which is what estimates and measurements count: stacks of
threads, heaps of arenas. Tiny runs of either backend map 30 to 60 MiB more than they fill."""
_STATUS = "/proc/self/status"


def limit_device(plan: Plan, engine: Engine) -> None:
    """Hold a CPU's trainer to its share of the machine, what its model holds already included.

    Raises `MemoryError` where the model alone is more.
    """
    fraction, total = plan.device.memory_fraction, engine.device.total_bytes
    if engine.device.kind != "cpu" or fraction is None or total is None:
        return
    allowed, held = int(fraction * total), engine.memory().allocated_bytes or 0
    if held > allowed:
        raise MemoryError(
            f"out of memory: the model and its optimizer hold {held:,} bytes of the {allowed:,} that "
            "device.memory_fraction allows"
        )
    limit_growth(allowed - held + MAPPED_BYTES)


def limit_growth(bytes_: int) -> None:
    """Let allocations fail that would take this process more than `bytes_` beyond what it has mapped now.

    Nothing happens where the system has no such limit.
    """
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        with open(_STATUS, encoding="ascii", errors="replace") as file:
            mapped = next(line for line in file if line.startswith("VmData:"))
        wanted = int(mapped.split()[1]) * 1024 + bytes_
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        if hard == resource.RLIM_INFINITY or wanted < hard:
            resource.setrlimit(resource.RLIMIT_DATA, (wanted, hard))


def lift_limit() -> None:
    """Make room for the last words of a trainer that ran into the limit."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
