"""Mechanical plants: oscillators, pendulums, drives."""

from __future__ import annotations

import numpy as np

from memconsole_trainer.systems.family import (
    Dynamics,
    Family,
    Parameters,
    second_order,
    state_space,
)

GRAVITY = 9.81


def _oscillator(p: Parameters) -> Dynamics:
    return second_order([[p["mass"]]], [[p["damping"]]], [[p["stiffness"]]], [[1.0]])


def _chain(
    masses: list[float], stiffness: list[float], damping: list[float], force: list[list[float]]
) -> Dynamics:
    """Masses on a line, each joined to the one before it by a spring and a damper; the first to a
    wall."""
    n = len(masses)
    s, d = np.zeros((n, n)), np.zeros((n, n))
    for i in range(n):
        for matrix, value in ((s, stiffness[i]), (d, damping[i])):
            matrix[i, i] += value
            if i:
                matrix[i - 1, i - 1] += value
                matrix[i - 1, i] -= value
                matrix[i, i - 1] -= value
    return second_order(np.diag(masses), d, s, force)


def _two_masses(p: Parameters) -> Dynamics:
    return _chain(
        [p["mass_1"], p["mass_2"]], [p["stiffness_1"], p["stiffness_2"]],
        [p["damping"], p["damping"]], [[1, 0], [0, 1]],
    )  # fmt: skip


def _three_masses(p: Parameters) -> Dynamics:
    return _chain(
        [p["mass_1"], p["mass_2"], p["mass_3"]], [p["stiffness"]] * 3, [p["damping"]] * 3,
        [[1, 0], [0, 0], [0, 1]],
    )  # fmt: skip


def _cart_pendulum(p: Parameters) -> Dynamics:
    """Upright; q = (cart position, angle)."""
    m, length = p["pendulum_mass"], p["length"]
    mass = [[p["cart_mass"] + m, m * length], [m * length, m * length**2]]
    return second_order(
        mass, [[p["friction"], 0], [0, 0]], [[0, 0], [0, -m * GRAVITY * length]], [[1], [0]]
    )


def _double_pendulum(p: Parameters) -> Dynamics:
    """Two rods' end masses above a cart, upright; q = (cart position, lower angle, upper angle)."""
    m0, m1, m2, l1, l2 = (p[k] for k in ("cart_mass", "mass_1", "mass_2", "length_1", "length_2"))
    mass = [
        [m0 + m1 + m2, (m1 + m2) * l1, m2 * l2],
        [(m1 + m2) * l1, (m1 + m2) * l1**2, m2 * l1 * l2],
        [m2 * l2, m2 * l1 * l2, m2 * l2**2],
    ]
    stiffness = np.diag([0.0, -(m1 + m2) * GRAVITY * l1, -m2 * GRAVITY * l2])
    return second_order(mass, np.diag([p["friction"], 0.0, 0.0]), stiffness, [[1], [0], [0]])


def _rotary_pendulum(p: Parameters) -> Dynamics:
    """Furuta's pendulum, upright; q = (arm angle, pendulum angle). The torque turns the arm."""
    m, r, length = p["mass"], p["arm"], p["length"]
    mass = [[p["arm_inertia"] + m * r**2, m * r * length], [m * r * length, m * length**2]]
    return second_order(
        mass, np.diag([p["friction"], 1e-4]), np.diag([0.0, -m * GRAVITY * length]), [[1], [0]]
    )


def _ball_beam(p: Parameters) -> Dynamics:
    """x = (ball position, its speed, beam angle, its speed); a torque turns the beam."""
    rolling = GRAVITY / (1 + 2 / 5)
    inertia = p["beam_inertia"]
    return state_space(
        [[0, 1, 0, 0], [0, 0, -rolling, 0], [0, 0, 0, 1],
         [-p["ball_mass"] * GRAVITY / inertia, 0, 0, -p["friction"] / inertia]],
        [[0], [0], [0], [1 / inertia]],
    )  # fmt: skip


def _levitation(p: Parameters) -> Dynamics:
    """A ball under an electromagnet; x = (gap, its speed, current)."""
    current = p["gap"] * np.sqrt(p["mass"] * GRAVITY / p["force"])
    over_gap = 2 * p["force"] * current**2 / (p["mass"] * p["gap"] ** 3)
    over_current = 2 * p["force"] * current / (p["mass"] * p["gap"] ** 2)
    return state_space(
        [[0, 1, 0], [over_gap, 0, -over_current], [0, 0, -p["resistance"] / p["inductance"]]],
        [[0], [0], [1 / p["inductance"]]],
    )


def _drive_train(p: Parameters) -> Dynamics:
    """Motor and load joined by an elastic shaft; x = (twist, motor speed, load speed)."""
    k, d, motor, load = p["stiffness"], p["damping"], p["motor_inertia"], p["load_inertia"]
    return state_space(
        [[0, 1, -1], [-k / motor, -d / motor, d / motor], [k / load, d / load, -d / load]],
        [[0], [1 / motor], [0]],
    )


FAMILIES = (
    Family(
        "mass_spring_damper", "mechanics", {"mass": 1.0, "damping": 0.4, "stiffness": 4.0},
        _oscillator, (1.0, 2.0), (5.0,),
    ),
    Family(
        "two_masses", "mechanics",
        {"mass_1": 1.0, "mass_2": 0.5, "stiffness_1": 10.0, "stiffness_2": 6.0, "damping": 0.3},
        _two_masses, (0.5, 0.5, 2.0, 2.0), (5.0, 5.0),
    ),
    Family(
        "three_masses", "mechanics",
        {"mass_1": 1.0, "mass_2": 1.5, "mass_3": 0.8, "stiffness": 20.0, "damping": 0.2},
        _three_masses, (0.3, 0.3, 0.3, 1.5, 1.5, 1.5), (6.0, 6.0),
    ),
    Family(
        "cart_pendulum", "mechanics",
        {"cart_mass": 1.0, "pendulum_mass": 0.2, "length": 0.5, "friction": 0.1},
        _cart_pendulum, (1.0, 0.3, 1.0, 1.0), (10.0,),
    ),
    Family(
        "double_pendulum", "mechanics",
        {"cart_mass": 1.5, "mass_1": 0.3, "mass_2": 0.2, "length_1": 0.6, "length_2": 0.5,
         "friction": 0.2},
        _double_pendulum, (1.0, 0.1, 0.1, 1.0, 0.5, 0.5), (20.0,),
    ),
    Family(
        "rotary_pendulum", "mechanics",
        {"mass": 0.13, "arm": 0.2, "length": 0.17, "arm_inertia": 0.002, "friction": 0.002},
        _rotary_pendulum, (0.8, 0.2, 3.0, 2.0), (0.4,),
    ),
    Family(
        "ball_beam", "mechanics", {"ball_mass": 0.11, "beam_inertia": 0.02, "friction": 0.02},
        _ball_beam, (0.3, 0.3, 0.2, 0.5), (0.8,),
    ),
    Family(
        "magnetic_levitation", "mechanics",
        {"mass": 0.06, "gap": 0.012, "force": 6.5e-5, "resistance": 10.0, "inductance": 0.4},
        _levitation, (0.002, 0.05, 0.3), (12.0,),
    ),
    Family(
        "drive_train", "mechanics",
        {"stiffness": 40.0, "damping": 0.05, "motor_inertia": 0.02, "load_inertia": 0.1},
        _drive_train, (0.1, 5.0, 5.0), (5.0,),
    ),
)  # fmt: skip
