"""How wide the bands of numbers are, from what the other parts of `make accuracy` stored.

    python tests/accuracy/bands.py

Writes the `exact` section of memconsole/memory/coefficients.json and, of its `runtime` section, the formula's
bands. A kind of device for which no truth was ever asked gets no exact band: its exact numbers keep the
formula's; and the formula's stays as it is.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

import msgspec

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from memconsole.memory.coefficients import Certainty
from tests.accuracy.results import Errors, stored

COEFFICIENTS = ROOT / "memconsole" / "memory" / "coefficients.json"
FLOOR = 0.01
"""No band is narrower than the bar that exact numbers are held to."""
FORMULA_FLOOR = 0.1
"""No band of the formula is narrower."""
FORMULA_TRUTHS = {
    ("torch", "cpu"): ("torch ~ peak on a CPU", ""),
    ("jax", "cpu"): ("jax ~ peak on a CPU", ""),
    ("jax", "gpu"): ("JAX `~`", "XLA for h100"),
    ("jax", "tpu"): ("JAX `~`", "XLA for tpu"),
}
"""By backend and kind of device, the rows that tell the formula's errors: the estimate's name, and how the
truth's begins."""
Factors = tuple[float, float]
REPLAYED: Factors = (0.97, 1.07)
"""Until a card was asked: the bar of the replay below; above, what allocators were seen to hold over the live
peak (AgileRL, 5.4-7 %)."""
COMPILED: Factors = (0.95, 1.05)
"""Until a device was asked. What XLA compiles for a described device is the program that runs there, and its
arguments and temporaries one arena (MaxText's train_compile reports a run's own out-of-memory); the
compiler's count may be over (MaxText pull request 4514), and the allocator rounds."""
BENCHED = ROOT / "tests" / "bench" / "results" / "optimizations.json"
"""Runs of other shapes, each with its formula, on a CPU. What they held beyond it may be scratch memory of kernels,
which neither number knows, so that on a CPU exact numbers may be as far below."""
DRIVER = "driver 0.13-1.24 GiB (published)"


def certainties() -> dict[str, dict[str, Certainty]]:
    """By backend and kind of device."""
    cards = "allocator not measured on a card"
    found = {
        "torch": {
            "cpu": _with_bench("torch", _measured("torch = peak on a CPU")),
            "gpu": _measured(
                "torch =",
                reserved="torch = reserved",
                unreplayed="torch = reserved, by the share at another length",
                otherwise=(REPLAYED, f"{DRIVER}, {cards}"),
            ),
        },
        "jax": {
            "cpu": _with_bench("jax", _measured("jax = peak on a CPU")),
            "gpu": _measured("JAX =") or _compiled(DRIVER),
            "tpu": _compiled("its runtime's share (libtpu)"),
        },
    }  # fmt: skip
    return {b: {k: sure for k, sure in kinds.items() if sure} for b, kinds in found.items()}


def _measured(
    name: str,
    reserved: str = "",
    unreplayed: str = "",
    otherwise: tuple[Factors, str] | None = None,
) -> Certainty | None:
    """From the rows of results that compare the estimate `name` with a truth; None where there are none.

    `otherwise`: the allocator's band where no row is called `reserved`, and words for it.
    """
    allocated, replayed, moved = _rows(name), _rows(reserved), _rows(unreplayed)
    if not allocated:
        return None
    words = [f"{row.truth} ({len(row.cases)} plans)" for row in (*allocated, *replayed)]
    around: Factors = (1.0, 1.0)
    if replayed:
        around = _factors(replayed)
    elif otherwise is not None:
        around = otherwise[0]
        words.append(otherwise[1])
    other = _spread(moved) if moved else (1.0, 1.0)
    return Certainty(
        allocated=_factors(allocated),
        reserved=around,
        unreplayed=(round(around[0] * other[0], 4), round(around[1] * other[1], 4)),
        source="; ".join(words),
    )


def _with_bench(backend: str, found: Certainty | None) -> Certainty | None:
    """`found`, its upper end no lower than the bench's runs reach."""
    if found is None:
        return None
    low, high = found.allocated
    return msgspec.structs.replace(
        found,
        allocated=(low, round(max(high, *_benched(backend)), 4)),
        source=f"{found.source}; above, what runs of `make bench` held over the formula",
    )


def _benched(backend: str) -> list[float]:
    """The truth over the formula of the bench's runs that started as the console starts them."""
    cases = json.loads(BENCHED.read_bytes())["results"].values()
    rows = [row for case in cases for row in case.get(backend, {}).values()]
    return [
        row["measured_bytes"] / row["estimated_bytes"]
        for row in rows
        if "measured_bytes" in row and "environment" not in row
    ]


def _compiled(beside: str) -> Certainty:
    source = f"compiled for the device, not measured on one: 5 % stated (MaxText); {beside}"
    return Certainty(allocated=COMPILED, source=source)


def _rows(name: str) -> list[Errors]:
    return [
        row
        for part in stored()
        for row in part.rows
        if name and isinstance(row, Errors) and row.estimate == name and row.cases
    ]


def _ratios(rows: list[Errors]) -> list[float]:
    """The truth over the estimate."""
    return [case.measured_bytes / case.estimated_bytes for row in rows for case in row.cases]


def _factors(rows: list[Errors], floor: float = FLOOR) -> Factors:
    """Lowest and highest, no closer to one than `floor`."""
    ratios = _ratios(rows)
    return round(min(1 - floor, *ratios), 4), round(max(1 + floor, *ratios), 4)


def _spread(rows: list[Errors]) -> Factors:
    """The 5th and the 95th percentile, about one."""
    cuts = statistics.quantiles(_ratios(rows), n=20)
    return min(1.0, cuts[0]), max(1.0, cuts[-1])


def formula_bands() -> dict[tuple[str, str], Factors]:
    """By backend and kind of device: what covers every plan that no coefficient was fitted to."""
    found = {}
    for place, (estimate, truth) in FORMULA_TRUTHS.items():
        rows = [row for row in _rows(estimate) if row.truth.startswith(truth)]
        if rows:
            low, high = _factors(rows, FORMULA_FLOOR)
            benched = _benched(place[0]) if place[1] == "cpu" else []
            found[place] = round(min([low, *benched]), 4), round(max([high, *benched]), 4)
    return found


def main() -> None:
    found = msgspec.to_builtins(certainties())
    print(json.dumps(found, indent=1))
    numbers = json.loads(COEFFICIENTS.read_bytes())
    numbers["exact"] = found
    for (backend, kind), band in formula_bands().items():
        print(f"{backend} on {kind}, formula: {band[0]}-{band[1]}")
        numbers["runtime"][backend][kind]["band"] = band
    COEFFICIENTS.write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
