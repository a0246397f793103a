"""The options of `memconsole fit`: which changes are allowed, and on how much memory and how many devices."""

from __future__ import annotations

import msgspec

from memconsole.devices.planned import missing_compiler
from memconsole.plan import plan as plans
from memconsole.plan.machine.budget import SEVERAL, Budget
from memconsole.plan.plan import Plan, PlanError, quote
from memconsole.plan.sections.words import meant
from memconsole.plan.toggles.optimization import Result
from memconsole.plan.toggles.optimizations import OPTIMIZATIONS
from memconsole.units import MIB, parse_bytes

ALLOW = {
    "16-bit": Result.ARITHMETIC,
    "16-bit-state": Result.STATE_16_BITS,
    "8-bit-state": Result.STATE_8_BITS,
    "optimizer": Result.OPTIMIZER,
    "quantized-base": Result.CODES,
    "adapters": Result.ADAPTERS,
}
"""The result classes by the names that --allow takes."""
LEAST_BUDGET = MIB
"""A smaller budget was probably given without its unit."""


def kept_key(word: str) -> str:
    """The setting that `word` of --keep names: a key, its last part if that is unambiguous, or another word for it.

    Raises `PlanError`.
    """
    if word in plans.SETTINGS:
        return word
    by_last_part = [key for key in plans.SETTINGS if key.rpartition(".")[2] == word]
    for keys in (by_last_part, meant(word, plans.SETTINGS)):
        if len(keys) == 1:
            return keys[0]
    known = ", ".join(row.key for row in OPTIMIZATIONS)
    raise PlanError(f"--keep {quote(word)}: unknown key{plans.hint(word) or f'; known: {known}'}")


def kept_on_machine(
    plan: Plan, device: Budget, kept: frozenset[str]
) -> tuple[frozenset[str], tuple[str, ...]]:
    """The settings to keep: the given ones and those that this machine forces, with the reasons."""
    missing = missing_compiler(plan, device)
    if not missing or plan.optimize.compile or "optimize.compile" in kept:
        return kept, ()
    return kept | {"optimize.compile"}, (f"torch.compile stays off: {missing} is missing here",)


def with_usable_bytes(device: Budget, amount: str) -> Budget:
    """`device` with the usable bytes from --budget. Raises `PlanError`."""
    try:
        usable = parse_bytes(amount)
    except ValueError:
        usable = -1
    if usable < LEAST_BUDGET:
        raise PlanError(
            f"--budget {quote(amount)}: expected an amount with its unit, such as 12GiB, 12GB or 800MiB"
        )
    return msgspec.structs.replace(
        device,
        usable_bytes=usable,
        total_bytes=max(device.total_bytes, usable),
        why="--budget",
    )


def check_device_count(count: int, device: Budget) -> None:
    """Raise `PlanError` if --devices asks for several devices of a kind of which a machine has only one."""
    if count > 1 and device.kind not in SEVERAL:
        raise PlanError(
            f"--devices {count}: {device.name} is one device, whose memory and cores several processes would "
            "share; expected 1, or a GPU or TPU in device.name"
        )
