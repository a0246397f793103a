"""Makes equipment records as JSON Lines: the symptoms of a machine, with their cause and solution.

A machine, a component and a failure are drawn for each record, 5,184 combinations. Cause and
solution follow from them by rule: the cause names component and failure; the solution names the repair of
that failure, part and torque of the component on that machine, and how the machine's family is put
back to work. The symptom describes component and failure in varying words, so that records without
codes can be answered too. Its other words carry no information.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from memconsole_trainer.data.make.bar import Bar
from memconsole_trainer.data.make.json_lines import write_records
from memconsole_trainer.data.make.maker import Facts, Request

WITHOUT_CODES = 0.15
"""Share of records without codes."""


class Component(NamedTuple):
    """A part that fails, its number in codes, its bolts' size class, and how its failure shows."""

    name: str
    number: int
    bolts: int
    signs: tuple[str, str]


class Failure(NamedTuple):
    """A way of failing: its number in codes, how it shows, and what is done about it."""

    name: str
    number: int
    signs: tuple[str, str]
    repair: str


COMPONENTS = tuple(
    Component(name, number, bolts, (first, second))
    for name, number, bolts, first, second in (
        ("fuel rail pressure sensor", 157, 0, "engine stalls under load", "power drops on hills"),
        ("coolant temperature sensor", 110, 0, "fan never stops", "temperature gauge is wrong"),
        ("oil pressure sensor", 100, 0, "oil lamp is lit", "oil gauge reads zero"),
        ("boost pressure sensor", 102, 1, "black smoke at full throttle", "turbo feels weak"),
        ("crankshaft sensor", 190, 1, "engine turns but does not start", "tachometer is dead"),
        ("throttle position sensor", 91, 0, "pedal has no effect", "speed hunts up and down"),
        ("exhaust gas valve", 27, 2, "rough idle", "engine knocks when warm"),
        ("particulate filter sensor", 3251, 1, "regeneration never ends", "exhaust is too hot"),
        ("injector of cylinder 1", 651, 2, "engine shakes at idle", "misfire on one cylinder"),
        ("injector of cylinder 4", 654, 2, "white smoke after start", "uneven exhaust note"),
        ("hydraulic pump", 1762, 3, "boom rises slowly", "hydraulics whine"),
        ("hydraulic oil temperature sensor", 1638, 0, "work stops when hot", "cooler runs all day"),
        ("swing motor valve", 2872, 2, "cab turns by jerks", "swing does not hold"),
        ("travel motor", 3059, 3, "machine pulls to one side", "left track lags"),
        ("brake pressure switch", 117, 1, "brakes feel soft", "brake warning sounds"),
        ("transmission oil sensor", 127, 1, "gears shift late", "second gear is skipped"),
        ("clutch solenoid", 740, 1, "machine will not move off", "drive engages with a bang"),
        ("battery", 168, 1, "starter turns slowly", "lights are dim"),
        ("alternator", 167, 2, "charge lamp is lit", "radio fades at work"),
        ("starter relay", 677, 0, "key turns without a sound", "starter clicks only"),
        ("intake heater", 729, 1, "hard start in the cold", "cold engine smokes"),
        ("urea pump", 4334, 2, "emission lamp is lit", "speed is limited by the computer"),
        ("air filter switch", 107, 0, "filter lamp is lit", "engine gasps for air"),
        ("wheel speed sensor", 84, 1, "speedometer jumps", "traction control cuts in"),
    )
)
FAILURES = tuple(
    Failure(name, number, (first, second), repair)
    for name, number, first, second, repair in (
        ("shorted to battery", 3, "constantly", "since the last wash", "replace the harness of"),
        ("shorted to ground", 4, "from the first minute", "after a repair of the cab", "insulate"),
        ("open circuit", 5, "on every rough road", "when the door slams", "reconnect"),
        ("mechanically stuck", 7, "after a long stop", "only in frost", "free and grease"),
        ("out of calibration", 13, "more and more each week", "by a small amount", "calibrate"),
        ("worn out", 31, "with a grinding noise", "with metal in the oil", "replace"),
        ("leaking", 18, "with a wet patch below", "and fluid is missing", "reseal"),
        ("clogged", 16, "worse in dust", "until it is blown out", "clean"),
        ("erratic signal", 2, "now and then", "without any pattern", "shield the cable of"),
    )
)
MACHINES = tuple(
    (f"{maker} {model}{mark} {family}", 3 * row + column + 12 * bool(mark), family)
    for mark in ("", "-2")
    for row, (family, models) in enumerate(
        (
            ("excavator", (320, 336, 349)),
            ("wheel loader", (926, 950, 972)),
            ("dozer", (61, 65, 85)),
            ("haul truck", (725, 740, 773)),
        )
    )
    for column, (maker, model) in enumerate(
        zip(("Kestrel", "Bruun", "Takeda"), models, strict=True)
    )
)
"""Name, number and family of each machine."""
ENDINGS = {
    "excavator": "clear the codes and swing twice",
    "wheel loader": "clear the codes and lift the bucket",
    "dozer": "clear the codes and drive 100 m",
    "haul truck": "clear the codes and test the brakes",
}
OPENINGS = ("operator reports", "driver says", "seen at inspection", "noted on the night shift",
            "told by radio", "customer complains")  # fmt: skip
PLACES = ("in the quarry", "on the slope", "near the crusher", "in the yard", "on site 7",
          "at the ramp", "below the bridge", "in the tunnel")  # fmt: skip


def torque(machine: int, component: Component) -> int:
    """Newton metres of the component's bolts on a machine."""
    return 20 + 3 * machine + 80 * component.bolts


def record(draw: np.random.Generator) -> dict[str, Any]:
    """One record."""
    name, number, family = MACHINES[draw.integers(len(MACHINES))]
    model = name.split()[1]
    component = COMPONENTS[draw.integers(len(COMPONENTS))]
    failure = FAILURES[draw.integers(len(FAILURES))]
    sign = component.signs[draw.integers(2)]
    manner = failure.signs[draw.integers(2)]
    opening, place = OPENINGS[draw.integers(len(OPENINGS))], PLACES[draw.integers(len(PLACES))]
    hours, degrees = int(draw.integers(40, 9000)), int(draw.integers(-15, 45))
    codes = [f"SPN {component.number}", f"FMI {failure.number}"]
    return {
        "equipment": name,
        "symptom": f"{opening}: {sign}, {manner}; {place}, {hours} hours, {degrees} degrees",
        "codes": [] if draw.random() < WITHOUT_CODES else codes,
        "diagnostic_steps": [f"inspect the {component.name}", f"look for: {failure.name}"],
        "cause": f"{component.name} {failure.name}",
        "solution": (
            f"{failure.repair} the {component.name}, part {model}-{component.number}, "
            f"tighten to {torque(number, component)} Nm, {ENDINGS[family]}"
        ),
    }


def make(request: Request, bar: Bar) -> Facts:
    """Write about `request.size` records."""
    coded = 0

    def records() -> Iterator[dict[str, Any]]:
        nonlocal coded
        draw = np.random.default_rng(request.seed)
        while True:
            made = record(draw)
            coded += bool(made["codes"])
            yield made

    written = write_records(request, bar, records())
    return {
        "records": written.records,
        "with_codes": coded,
        "machines": len(MACHINES),
        "components": len(COMPONENTS),
        "failures": len(FAILURES),
        "size_bytes": written.size_bytes,
    }
