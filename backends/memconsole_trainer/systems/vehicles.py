"""Cars and ships: suspensions, steering, distance keeping, positioning."""

from __future__ import annotations

import numpy as np

from memconsole_trainer.systems.family import (
    Dynamics,
    Family,
    Parameters,
    second_order,
    state_space,
)


def _quarter_car(p: Parameters) -> Dynamics:
    """Active suspension; q = (body height, wheel height)."""
    k, d = p["spring"], p["damper"]
    return second_order(
        np.diag([p["body_mass"], p["wheel_mass"]]),
        [[d, -d], [-d, d]],
        [[k, -k], [-k, k + p["tyre"]]],
        [[1], [-1]],
    )


def _half_car(p: Parameters) -> Dynamics:
    """Active suspension; q = (body height, pitch, front wheel, rear wheel)."""
    front, rear = p["front"], p["rear"]
    mass = np.diag([p["body_mass"], p["pitch_inertia"], p["wheel_mass"], p["wheel_mass"]])
    # Compression of each strut: body height at its axle minus the wheel's height.
    strut = np.array([[1, -front, -1, 0], [1, rear, 0, -1]], dtype=np.float64)
    stiffness = p["spring"] * strut.T @ strut + np.diag([0, 0, p["tyre"], p["tyre"]])
    return second_order(mass, p["damper"] * strut.T @ strut, stiffness, strut.T)


def _bicycle(p: Parameters) -> tuple[float, ...]:
    """Coefficients of the single-track model at a given speed: lateral speed and yaw rate."""
    m, i, v = p["mass"], p["yaw_inertia"], p["speed"]
    cf, cr, a, b = p["front_stiffness"], p["rear_stiffness"], p["front"], p["rear"]
    return (
        -(cf + cr) / (m * v), -v - (a * cf - b * cr) / (m * v),
        -(a * cf - b * cr) / (i * v), -(a**2 * cf + b**2 * cr) / (i * v),
        cf / m, a * cf / i,
    )  # fmt: skip


def _lane_keeping(p: Parameters) -> Dynamics:
    """x = (offset from the lane, heading, lateral speed, yaw rate), u = steering angle."""
    yy, yr, ry, rr, by, br = _bicycle(p)
    return state_space(
        [[0, p["speed"], 1, 0], [0, 0, 0, 1], [0, 0, yy, yr], [0, 0, ry, rr]],
        [[0], [0], [by], [br]],
    )


def _yaw_stability(p: Parameters) -> Dynamics:
    """x = (lateral speed, yaw rate), u = (steering angle, yaw moment of the brakes in kN m)."""
    yy, yr, ry, rr, by, br = _bicycle(p)
    return state_space([[yy, yr], [ry, rr]], [[by, 0], [br, 1e3 / p["yaw_inertia"]]])


def _cruise(p: Parameters) -> Dynamics:
    """x = (distance error, speed error, acceleration); the engine follows with a lag."""
    return state_space(
        [[0, 1, -p["headway"]], [0, 0, -1], [0, 0, -1 / p["lag"]]],
        [[0], [0], [p["gain"] / p["lag"]]],
    )


def _ship_heading(p: Parameters) -> Dynamics:
    """Nomoto's model with the rudder machine; x = (heading, turn rate, rudder angle)."""
    return state_space(
        [[0, 1, 0], [0, -1 / p["time"], p["gain"] / p["time"]], [0, 0, -1 / p["rudder_time"]]],
        [[0], [0], [1 / p["rudder_time"]]],
    )


def _vessel(p: Parameters) -> Dynamics:
    """Dynamic positioning at low speed; q = (surge, sway, yaw), u = forces in kN and moment."""
    coupling = p["mass"] * p["offset"]
    mass = [
        [p["mass"], 0, 0], [0, 1.3 * p["mass"], coupling], [0, coupling, p["yaw_inertia"]],
    ]  # fmt: skip
    damping = np.diag([p["surge_drag"], p["sway_drag"], p["yaw_drag"]])
    return second_order(mass, damping, np.zeros((3, 3)), 1e3 * np.diag([1.0, 1.0, 20.0]))


_CAR = {
    "mass": 1500.0, "yaw_inertia": 2500.0, "speed": 25.0, "front_stiffness": 9e4,
    "rear_stiffness": 1.1e5, "front": 1.2, "rear": 1.5,
}  # fmt: skip

FAMILIES = (
    Family(
        "quarter_car", "vehicles",
        {"body_mass": 300.0, "wheel_mass": 40.0, "spring": 1.6e4, "damper": 1e3, "tyre": 1.6e5},
        _quarter_car, (0.05, 0.02, 0.5, 1.0), (1500.0,),
    ),
    Family(
        "half_car", "vehicles",
        {"body_mass": 600.0, "pitch_inertia": 900.0, "wheel_mass": 40.0, "spring": 1.8e4,
         "damper": 1.2e3, "tyre": 1.7e5, "front": 1.2, "rear": 1.4},
        _half_car, (0.05, 0.04, 0.02, 0.02, 0.4, 0.4, 1.0, 1.0), (1500.0, 1500.0),
    ),
    Family("lane_keeping", "vehicles", _CAR, _lane_keeping, (0.5, 0.05, 0.5, 0.2), (0.06,)),
    Family("yaw_stability", "vehicles", _CAR, _yaw_stability, (1.0, 0.3), (0.06, 4.0)),
    Family(
        "cruise_distance", "vehicles", {"headway": 1.4, "lag": 0.4, "gain": 1.0},
        _cruise, (5.0, 2.0, 1.0), (2.0,),
    ),
    Family(
        "ship_heading", "vehicles", {"time": 20.0, "gain": 0.1, "rudder_time": 2.0},
        _ship_heading, (0.2, 0.02, 0.2), (0.3,),
    ),
    Family(
        "vessel_positioning", "vehicles",
        {"mass": 6e6, "yaw_inertia": 3.5e9, "offset": 3.0, "surge_drag": 5e4, "sway_drag": 2e5,
         "yaw_drag": 4e8},
        _vessel, (5.0, 5.0, 0.1, 0.3, 0.3, 0.005), (500.0, 500.0, 500.0),
    ),
)  # fmt: skip
