"""What a trainer on a CPU may allocate: what the machine has left, or the plan's share of it.

A GPU's allocator has a setting for it. A process has the kernel's limit on private writable memory
(setrlimit(2), RLIMIT_DATA; anonymous mappings count since Linux 4.7), beyond which an allocation fails as
an error that can be told and met with smaller micro-batches, while memory that the machine really lacks
ends the process by SIGKILL. Memory that other processes take later is not foreseen.

The kernel counts what is mapped, but only what is filled uses memory up, and estimates and measurements count
that alone. What is mapped beside it (stacks of threads, heaps of arenas) is allowed on top, as measured and not
much more: whatever of that is not needed can be filled too, and up to there the kernel kills before the limit.
"""

from __future__ import annotations

import contextlib
import os

from memconsole import available_memory
from memconsole.plan.plan import Plan
from memconsole_trainer.engine import Engine

MIB = 2**20
SHARE_MAPPED_BYTES = 64 * MIB
"""Allowed on top of a share. Tiny runs of either backend map 30 to 60 MiB more than they fill, their build included."""
BUILD_MAPPED_BYTES = {"torch": 64 * MIB, "jax": 256 * MIB}
"""From the build on, runs of 1 to 30 M parameters map 39 to 46 (torch) and 54 to 206 MiB (JAX, whose compiler has threads
and pools of its own) more than they fill."""
STEPS_MAPPED_BYTES = 32 * MIB
"""From the first step on, 18 to 26 (torch) and 5 to 7 MiB (JAX)."""
COMPILER_MAPPED_BYTES = 64 * MIB
"""Of torch's compiler, which works in the first step: 3 threads with 2 compiling processes, 8 with 32."""
STACK_BYTES = 8 * MIB
"""Of a thread."""
_STATUS = "/proc/self/status"


def limit_build(plan: Plan, engine: Engine) -> None:
    """Hold a CPU's trainer to what the machine, or its control group, has left: call before its model is built.

    What the data's libraries have mapped by now is not counted; Arrow's alone maps 1 GiB of which it fills a tenth.
    Where the plan's share is more, its word is taken for it.
    """
    if engine.device.kind == "cpu":
        left = max(available_memory.fillable_bytes(), _share(plan, engine) or 0)
        limit_growth(left + BUILD_MAPPED_BYTES[plan.backend] + _stacks())


def limit_steps(plan: Plan, engine: Engine) -> None:
    """Hold a CPU's trainer to what is left, or to its share of the machine, what its model holds already included.

    Raises `MemoryError` where the model alone is more than the share.
    """
    if engine.device.kind != "cpu":
        return
    allowed = _share(plan, engine)
    if allowed is None:
        compiler = COMPILER_MAPPED_BYTES if plan.optimize.compile else 0
        left = available_memory.fillable_bytes()
        limit_growth(left + STEPS_MAPPED_BYTES + compiler + _stacks())
        return
    held = engine.memory().allocated_bytes or 0
    if held > allowed:
        raise MemoryError(
            f"out of memory: the model and its optimizer hold {held:,} bytes of the {allowed:,} that "
            "device.memory_fraction allows"
        )
    limit_growth(allowed - held + SHARE_MAPPED_BYTES)


def limit_growth(bytes_: int) -> None:
    """Let allocations fail that would take this process more than `bytes_` beyond what it has mapped now.

    Nothing happens where the system has no such limit.
    """
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        wanted = _status("VmData") * 1024 + bytes_
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        if hard == resource.RLIM_INFINITY or wanted < hard:
            resource.setrlimit(resource.RLIMIT_DATA, (wanted, hard))


def lift_limit() -> None:
    """Make room for the last words of a trainer that ran into the limit."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


def _share(plan: Plan, engine: Engine) -> int | None:
    fraction, total = plan.device.memory_fraction, engine.device.total_bytes
    return None if fraction is None or total is None else int(fraction * total)


def _stacks() -> int:
    """Of the threads that are still to be started, where each processor gets one."""
    with contextlib.suppress(OSError, ValueError):
        return STACK_BYTES * max(0, (os.cpu_count() or 1) - _status("Threads"))
    return 0


def _status(name: str) -> int:
    """A number of this process. Raises `OSError` and `ValueError`."""
    with open(_STATUS, encoding="ascii", errors="replace") as file:
        for line in file:
            if line.startswith(f"{name}:"):
                return int(line.split()[1])
    raise ValueError(name)
