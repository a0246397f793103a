"""Counts the items of a plan's ratings in another process, while the plan is shown with an assumed number."""

from __future__ import annotations

import asyncio
import contextlib

from memconsole.plan.plan import Plan, PlanError


class ItemCounts:
    """Remembers which counts were begun, so that none is begun twice."""

    def __init__(self) -> None:
        self._begun: set[str] = set()

    def wanted(self, plan: Plan) -> str | None:
        """The name of the count that is to begin now; None if there is none."""
        from memconsole.inspection import uncounted

        name = uncounted(plan)
        if name is None or name in self._begun:
            return None
        self._begun.add(name)
        return name


async def counted(plan: Plan, name: str) -> bool:
    """Count the items of the plan's ratings and remember them as `name`. False if they cannot be read; a launch says why.
    The reader ends if this is cancelled."""
    from memconsole.inspection import answer, data_settings, keep_items, reader

    source, pipe = plan.data.source, asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *reader(source, data_settings(plan)),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=pipe,
        stderr=pipe,
    )
    try:
        out, errors = await process.communicate()
        keep_items(name, answer(source, process.returncode or 0, out, errors))
    except PlanError:
        return False
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    return True
