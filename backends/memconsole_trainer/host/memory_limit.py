"""Limits what a trainer on a CPU may allocate: to what the machine has left, or to the plan's share
of it.

A GPU's allocator has a setting for this. For a process, the kernel limits private writable memory
(setrlimit(2), RLIMIT_DATA; anonymous mappings count since Linux 4.7). An allocation beyond the
limit fails with an error, which can be reported and answered with smaller micro-batches. When the
machine itself runs out of memory, the kernel kills the process instead. Memory that other processes
take later is not accounted for.

The kernel's limit counts all mapped memory, but only touched pages use physical memory, and estimates and
measurements count only those. Therefore an allowance for mapped but untouched memory (thread stacks, heap
arenas) is added to the limit. It must be close to the measured need: if it is too large, the process can
fill it with touched pages, and the kernel kills the process before it reaches the limit.
"""

from __future__ import annotations

import contextlib
import os

from memconsole import available_memory
from memconsole.plan.plan import Plan
from memconsole.plan.processes import nodes, processes
from memconsole_trainer.engine import Engine
from memconsole_trainer.host import heap

MIB = 2**20
SHARE_MAPPED_BYTES = 64 * MIB
"""Allowance on top of a share. Tiny runs of either backend map 30 to 60 MiB more than they touch,
including the build."""
BUILD_MAPPED_BYTES = {"torch": 64 * MIB, "jax": 256 * MIB}
"""Allowance from the build on. Runs of 1 to 30 M parameters map 39 to 46 MiB (torch) or 54 to 206
MiB (JAX, whose compiler has its own threads and pools) more than they touch."""
STEPS_MAPPED_BYTES = 32 * MIB
"""Allowance from the first step on. Measured: 18 to 26 MiB (torch), 5 to 7 MiB (JAX)."""
COMPILER_MAPPED_BYTES = 64 * MIB
"""Allowance for torch's compiler in the first step: it starts 3 threads with 2 compile processes, 8
with 32."""
STACK_BYTES = 8 * MIB
"""Mapped stack of one thread."""
_STATUS = "/proc/self/status"


def limit_build(plan: Plan, engine: Engine) -> None:
    """Limit a trainer on a CPU to what the machine or its control group has left. Call before the
    model is built.

    Memory that data libraries have mapped already is not counted: Arrow alone maps 1 GiB and
    touches a tenth of it. If the plan's share is larger than what is left, the share is the limit.
    """
    if engine.device.kind == "cpu":
        left = max(_left(plan), _share(plan, engine) or 0)
        limit_growth(left + BUILD_MAPPED_BYTES[plan.backend] + _stacks())


def limit_steps(plan: Plan, engine: Engine) -> None:
    """Limit a trainer on a CPU to what is left, or to its share of the machine. The share includes
    the built model.

    Raises `MemoryError` if the model alone exceeds the share.
    """
    if engine.device.kind != "cpu":
        return
    allowed = _share(plan, engine)
    if allowed is None:
        compiler = COMPILER_MAPPED_BYTES if plan.optimize.compile else 0
        left = _left(plan)
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
    """Make allocations fail that would map more than `bytes_` beyond what this process has mapped
    now.

    Free memory of the heap is returned to the system first, because it is mapped and would raise the limit. Does
    nothing on systems without such a limit.
    """
    heap.trim()
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        wanted = _status("VmData") * 1024 + bytes_
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        if hard == resource.RLIM_INFINITY or wanted < hard:
            resource.setrlimit(resource.RLIMIT_DATA, (wanted, hard))


def lift_limit() -> None:
    """Remove the limit, so that a trainer that reached it can still report and clean up."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


def _left(plan: Plan) -> int:
    """The bytes that this process may take of those that its machine has left: the processes there share them."""
    return available_memory.fillable_bytes() // _processes_of_machine(plan)


def _share(plan: Plan, engine: Engine) -> int | None:
    """The bytes that `device.memory_fraction` allows this process; the processes on a CPU share them. None without one."""
    fraction, total = plan.device.memory_fraction, engine.device.total_bytes
    if fraction is None or total is None:
        return None
    sharing = _processes_of_machine(plan) if engine.device.kind == "cpu" else 1
    return int(fraction * total) // sharing


def _processes_of_machine(plan: Plan) -> int:
    machines = nodes(plan) if plan.launch.on == "slurm" else 1
    return max(1, processes(plan) // machines)


def _stacks() -> int:
    """Stack bytes of the threads still to be started, assuming one thread per processor."""
    with contextlib.suppress(OSError, ValueError):
        return STACK_BYTES * max(0, (os.cpu_count() or 1) - _status("Threads"))
    return 0


def _status(name: str) -> int:
    """A number from this process's status file. Raises `OSError` and `ValueError`."""
    with open(_STATUS, encoding="ascii", errors="replace") as file:
        for line in file:
            if line.startswith(f"{name}:"):
                return int(line.split()[1])
    raise ValueError(name)
