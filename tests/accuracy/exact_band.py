"""How wide the band of an exact number is, from what `make accuracy` measured: written into coefficients.json.

    python tests/accuracy/exact_band.py [--write]

A kind of device without a measurement of traced bytes gets none: its exact numbers keep the formula's band.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import msgspec

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from memconsole.memory.coefficients import Certainty  # noqa: E402
from tests.accuracy.results import Errors, stored  # noqa: E402

COEFFICIENTS = ROOT / "memconsole" / "memory" / "coefficients.json"
ALLOCATED = {("torch", "gpu"): "torch =", ("jax", "gpu"): "JAX ="}
"""The rows of results that compare traced or compiled bytes with a truth."""
RESERVED = {("torch", "gpu"): "torch = reserved"}
FLOOR = 0.01
"""No band is narrower than the bar that exact numbers are held to."""
RESERVED_UNMEASURED = (0.97, 1.07)
"""Bar of the replay below; above, what allocators were seen to hold over the live peak (AgileRL, 5.4-7 %)."""
UNREPLAYED = (0.78, 1.28)
"""Allocators held 3.7 to 28 % over the live peak (replays of 11 configurations)."""


def certainties() -> dict[str, dict[str, Certainty]]:
    """By backend and kind of device, for those that have a measurement."""
    rows = [row for part in stored() for row in part.rows if isinstance(row, Errors)]
    found: dict[str, dict[str, Certainty]] = {}
    for (backend, kind), name in ALLOCATED.items():
        allocated = [row for row in rows if row.estimate == name and row.cases]
        if not allocated:
            continue
        reserved = [
            row for row in rows if row.estimate == RESERVED.get((backend, kind)) and row.cases
        ]
        truths = ", ".join(
            f"{row.truth} ({len(row.cases)} plans)" for row in (*allocated, *reserved)
        )
        driver = "driver 0.13-1.24 GiB (published)"
        unmeasured = "" if reserved else ", allocator not measured on a card"
        found.setdefault(backend, {})[kind] = Certainty(
            allocated=_factors(allocated),
            reserved=_factors(reserved) if reserved else RESERVED_UNMEASURED,
            unreplayed=UNREPLAYED,
            source=f"{truths}; {driver}{unmeasured}",
        )
    return found


def _factors(rows: list[Errors]) -> tuple[float, float]:
    """The truth over the estimate, lowest and highest, no closer to one than the bar."""
    ratios = [case.measured_bytes / case.estimated_bytes for row in rows for case in row.cases]
    return round(min(1 - FLOOR, *ratios), 4), round(max(1 + FLOOR, *ratios), 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="into coefficients.json")
    found = msgspec.to_builtins(certainties())
    print(json.dumps(found, indent=1))
    if parser.parse_args().write:
        numbers = json.loads(COEFFICIENTS.read_bytes())
        numbers["exact"] = found
        COEFFICIENTS.write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
