"""Aircraft and spacecraft around steady flight."""

from __future__ import annotations

import numpy as np

from memconsole_trainer.systems.family import Dynamics, Family, Parameters, state_space

GRAVITY = 9.81


def _longitudinal(p: Parameters) -> Dynamics:
    """Aircraft; x = (forward speed, vertical speed, pitch rate, pitch), u = (elevator, throttle)."""
    return state_space(
        [[p["xu"], p["xw"], 0, -GRAVITY], [p["zu"], p["zw"], p["speed"], 0],
         [p["mu"], p["mw"], p["mq"], 0], [0, 0, 1, 0]],
        [[0, p["thrust"]], [p["z_elevator"], 0], [p["m_elevator"], 0], [0, 0]],
    )  # fmt: skip


def _lateral(p: Parameters) -> Dynamics:
    """Aircraft; x = (sideslip, roll rate, yaw rate, bank), u = (aileron, rudder)."""
    return state_space(
        [[p["yb"], 0, -1, GRAVITY / p["speed"]], [p["lb"], p["lp"], p["lr"], 0],
         [p["nb"], p["np"], p["nr"], 0], [0, 1, 0, 0]],
        [[0, p["y_rudder"]], [p["l_aileron"], p["l_rudder"]], [p["n_aileron"], p["n_rudder"]],
         [0, 0]],
    )  # fmt: skip


def _rocket(p: Parameters) -> Dynamics:
    """Launcher with a gimballed engine; x = (pitch, pitch rate, drift speed, gimbal angle)."""
    return state_space(
        [[0, 1, 0, 0], [p["aerodynamic"], 0, 0, p["control"]],
         [p["lift"], 0, 0, p["side_thrust"]], [0, 0, 0, -1 / p["lag"]]],
        [[0], [0], [0], [1 / p["lag"]]],
    )  # fmt: skip


def _rendezvous(p: Parameters) -> Dynamics:
    """Clohessy & Wiltshire 1960: motion relative to a circular orbit; u = forces."""
    n, m = p["orbit_rate"], p["mass"]
    a = np.zeros((6, 6))
    a[:3, 3:] = np.eye(3)
    a[3, 0], a[3, 4], a[4, 3], a[5, 2] = 3 * n**2, 2 * n, -2 * n, -(n**2)
    return a, np.vstack([np.zeros((3, 3)), np.eye(3) / m])


def _satellite(p: Parameters) -> Dynamics:
    """Attitude in orbit with gravity gradient (Hughes 1986, section 9.1); x = (roll, pitch, yaw and
    their rates)."""
    ix, iy, iz, n = p["inertia_x"], p["inertia_y"], p["inertia_z"], p["orbit_rate"]
    a = np.zeros((6, 6))
    a[:3, 3:] = np.eye(3)
    a[3, 0], a[3, 5] = -4 * n**2 * (iy - iz) / ix, n * (ix - iy + iz) / ix
    a[4, 1] = -3 * n**2 * (ix - iz) / iy
    a[5, 2], a[5, 3] = -(n**2) * (iy - ix) / iz, -n * (ix - iy + iz) / iz
    return a, np.vstack([np.zeros((3, 3)), np.diag([1 / ix, 1 / iy, 1 / iz])])


def _quadrotor(p: Parameters) -> Dynamics:
    """Hover; x = (position, roll pitch yaw, velocity, rates), u = (thrust, three moments)."""
    a, b = np.zeros((12, 12)), np.zeros((12, 4))
    a[:6, 6:] = np.eye(6)
    a[6, 4], a[7, 3] = GRAVITY, -GRAVITY
    for axis in (6, 7, 8):
        a[axis, axis] = -p["drag"] / p["mass"]
    b[8, 0] = 1 / p["mass"]
    b[9, 1], b[10, 2], b[11, 3] = 1 / p["inertia_x"], 1 / p["inertia_y"], 1 / p["inertia_z"]
    return a, b


FAMILIES = (
    Family(
        "aircraft_longitudinal", "aerospace",
        {"xu": -0.0066, "xw": 0.0267, "zu": -0.09, "zw": -0.62, "speed": 150.0, "mu": 1e-4,
         "mw": -0.008, "mq": -0.9, "thrust": 3.0, "z_elevator": -6.0, "m_elevator": -2.0},
        _longitudinal, (5.0, 5.0, 0.1, 0.1), (0.15, 0.6),
    ),
    Family(
        "aircraft_lateral", "aerospace",
        {"yb": -0.15, "speed": 120.0, "lb": -4.0, "lp": -2.0, "lr": 0.6, "nb": 2.5, "np": -0.1,
         "nr": -0.4, "y_rudder": 0.03, "l_aileron": 5.0, "l_rudder": 0.8, "n_aileron": -0.2,
         "n_rudder": -1.8},
        _lateral, (0.1, 0.3, 0.2, 0.3), (0.2, 0.2),
    ),
    Family(
        "rocket_pitch", "aerospace",
        {"aerodynamic": 1.5, "control": 3.5, "lift": 12.0, "side_thrust": 14.0, "lag": 0.1},
        _rocket, (0.05, 0.1, 2.0, 0.08), (0.1,),
    ),
    Family(
        "orbit_rendezvous", "aerospace", {"orbit_rate": 1.1e-3, "mass": 200.0},
        _rendezvous, (50.0, 50.0, 50.0, 0.3, 0.3, 0.3), (2.0, 2.0, 2.0),
    ),
    Family(
        "satellite_attitude", "aerospace",
        {"inertia_x": 120.0, "inertia_y": 150.0, "inertia_z": 90.0, "orbit_rate": 1.1e-3},
        _satellite, (0.1, 0.1, 0.1, 0.01, 0.01, 0.01), (0.2, 0.2, 0.2),
    ),
    Family(
        "quadrotor", "aerospace",
        {"mass": 1.0, "drag": 0.1, "inertia_x": 0.01, "inertia_y": 0.011, "inertia_z": 0.02},
        _quadrotor, (1.0, 1.0, 1.0, 0.3, 0.3, 0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0),
        (5.0, 0.3, 0.3, 0.2),
    ),
)  # fmt: skip
