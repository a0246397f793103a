"""Electrical plants: circuits, converters, motors."""

from __future__ import annotations

from memconsole_trainer.systems.family import Dynamics, Family, Parameters, state_space


def _resonant_circuit(p: Parameters) -> Dynamics:
    """Series resistor, coil and capacitor; x = (capacitor voltage, current)."""
    c, inductance = p["capacitance"], p["inductance"]
    return state_space(
        [[0, 1 / c], [-1 / inductance, -p["resistance"] / inductance]], [[0], [1 / inductance]]
    )


def _buck(p: Parameters) -> Dynamics:
    """Averaged step-down converter; x = (coil current, output voltage), u = duty ratio."""
    inductance, c = p["inductance"], p["capacitance"]
    return state_space(
        [[0, -1 / inductance], [1 / c, -1 / (c * p["load"])]], [[p["voltage"] / inductance], [0]]
    )


def _boost(p: Parameters) -> Dynamics:
    """Averaged step-up converter around a duty ratio of one half; x = (coil current, output
    voltage)."""
    inductance, c, off = p["inductance"], p["capacitance"], 0.5
    output = p["voltage"] / off
    return state_space(
        [[-p["resistance"] / inductance, -off / inductance], [off / c, -1 / (c * p["load"])]],
        [[output / inductance], [-output / (off * p["load"] * c)]],
    )


def _dc_motor(p: Parameters) -> Dynamics:
    """x = (angle, speed, current), u = voltage."""
    torque, inertia, inductance = p["torque_constant"], p["inertia"], p["inductance"]
    return state_space(
        [[0, 1, 0], [0, -p["friction"] / inertia, torque / inertia],
         [0, -torque / inductance, -p["resistance"] / inductance]],
        [[0], [0], [1 / inductance]],
    )  # fmt: skip


def _synchronous_motor(p: Parameters) -> Dynamics:
    """Permanent magnets, in the rotor's frame at an operating speed; x = (d current, q current,
    speed)."""
    ratio, coil, flux, speed = p["resistance"] / p["inductance"], p["inductance"], p["flux"], 100.0
    pairs = 4.0
    return state_space(
        [[-ratio, pairs * speed, 0], [-pairs * speed, -ratio, -pairs * flux / coil],
         [0, 1.5 * pairs * flux / p["inertia"], -p["friction"] / p["inertia"]]],
        [[1 / coil, 0], [0, 1 / coil], [0, 0]],
    )  # fmt: skip


def _grid_filter(p: Parameters) -> Dynamics:
    """Coil, capacitor, coil between an inverter and the grid, in the frame of the grid's 50 Hz;
    x = (inverter currents, capacitor voltages, grid currents), d and q each."""
    l1, l2, c, r, w = p["inverter_coil"], p["grid_coil"], p["capacitance"], p["resistance"], 314.16
    return state_space(
        [[-r / l1, w, -1 / l1, 0, 0, 0], [-w, -r / l1, 0, -1 / l1, 0, 0],
         [1 / c, 0, 0, w, -1 / c, 0], [0, 1 / c, -w, 0, 0, -1 / c],
         [0, 0, 1 / l2, 0, -r / l2, w], [0, 0, 0, 1 / l2, -w, -r / l2]],
        [[1 / l1, 0], [0, 1 / l1], [0, 0], [0, 0], [0, 0], [0, 0]],
    )  # fmt: skip


FAMILIES = (
    Family(
        "resonant_circuit", "electronics",
        {"resistance": 2.0, "inductance": 1e-3, "capacitance": 1e-5},
        _resonant_circuit, (10.0, 1.0), (10.0,),
    ),
    Family(
        "buck_converter", "electronics",
        {"inductance": 1e-4, "capacitance": 1e-4, "load": 5.0, "voltage": 24.0},
        _buck, (2.0, 3.0), (0.3,),
    ),
    Family(
        "boost_converter", "electronics",
        {"inductance": 2e-4, "capacitance": 2e-4, "load": 20.0, "voltage": 12.0, "resistance": 0.1},
        _boost, (2.0, 4.0), (0.3,),
    ),
    Family(
        "dc_motor", "electronics",
        {"torque_constant": 0.05, "inertia": 1e-4, "friction": 1e-5, "resistance": 1.0,
         "inductance": 1e-3},
        _dc_motor, (1.0, 50.0, 5.0), (12.0,),
    ),
    Family(
        "synchronous_motor", "electronics",
        {"resistance": 0.5, "inductance": 2e-3, "flux": 0.1, "inertia": 1e-3, "friction": 1e-3},
        _synchronous_motor, (5.0, 5.0, 20.0), (40.0, 40.0),
    ),
    Family(
        "grid_filter", "electronics",
        {"inverter_coil": 2e-3, "grid_coil": 1e-3, "capacitance": 1e-5, "resistance": 0.1},
        _grid_filter, (5.0, 5.0, 50.0, 50.0, 5.0, 5.0), (100.0, 100.0),
    ),
)  # fmt: skip
