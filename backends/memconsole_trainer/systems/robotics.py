"""Robots: arms around a pose, elastic joints, balancing and driving bases."""

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


def _arm(p: Parameters, *bends: float) -> Dynamics:
    """A planar arm of equal links with point masses at their ends, around a pose; q = joint angles.

    The links' angles from the upward vertical are `pose` times `bends`. Geared motors act at the
    joints; their rotors turn with them.
    """
    links, mass, length = len(bends), p["mass"], p["length"]
    angles = p["pose"] * np.array(bends)
    share = np.array([[mass * (links - max(i, j)) for j in range(links)] for i in range(links)])
    inertia = share * length**2 * np.cos(angles[:, None] - angles[None, :])
    gravity = -GRAVITY * length * np.diag(mass * (links - np.arange(links)) * np.cos(angles))
    # Link angles are sums of joint angles.
    joints = np.tril(np.ones((links, links)))
    return second_order(
        joints.T @ inertia @ joints + p["rotor"] * np.eye(links),
        p["friction"] * np.eye(links),
        joints.T @ gravity @ joints,
        np.eye(links),
    )


def _two_links(p: Parameters) -> Dynamics:
    return _arm(p, 0.5, 1.5)


def _three_links(p: Parameters) -> Dynamics:
    return _arm(p, 0.3, 0.8, 1.6)


def _six_links(p: Parameters) -> Dynamics:
    return _arm(p, 0.2, 0.5, 0.9, 1.2, 1.5, 1.9)


def _flexible_joint(p: Parameters) -> Dynamics:
    """q = (motor angle, link angle), hanging, joined by a spring."""
    k = p["stiffness"]
    return second_order(
        np.diag([p["motor_inertia"], p["link_inertia"]]),
        np.diag([p["friction"], 0.0]),
        [[k, -k], [-k, k + p["mass"] * GRAVITY * p["length"]]],
        [[1], [0]],
    )


def _balancing(p: Parameters) -> Dynamics:
    """Two-wheeled robot, upright; q = (wheel angle, tilt). The torque acts between them."""
    m, r, length = p["body_mass"], p["radius"], p["length"]
    coupling = m * r * length
    mass = [
        [(m + p["wheel_mass"] * 1.5) * r**2, coupling],
        [coupling, m * length**2 + p["body_inertia"]],
    ]
    d = p["friction"]
    return second_order(
        mass, [[d, -d], [-d, d]], np.diag([0.0, -m * GRAVITY * length]), [[1], [-1]]
    )


def _path_tracking(p: Parameters) -> Dynamics:
    """Differential drive on an arc; x = (ahead, aside, heading error), u = speed and turn rate."""
    v, w = p["speed"], p["turn_rate"]
    return state_space([[0, w, 0], [-w, 0, v], [0, 0, 0]], [[1, 0], [0, 0], [0, 1]])


def _omnidirectional(p: Parameters) -> Dynamics:
    """Base on three omni wheels; q = (x, y, heading), u = wheel forces."""
    angle = np.array([0.5, 7 / 6, 11 / 6]) * np.pi
    force = np.stack([-np.sin(angle), np.cos(angle), np.full(3, p["radius"])])
    mass = np.diag([p["mass"], p["mass"], p["inertia"]])
    return second_order(mass, p["friction"] * np.eye(3), np.zeros((3, 3)), force)


def _underwater(p: Parameters) -> Dynamics:
    """Submarine robot; q = (surge, sway, heave, roll, pitch, yaw), buoyant above its centre of mass;
    u = six thrusters."""
    m, righting = p["mass"], p["mass"] * GRAVITY * p["metacentre"]
    inertia = p["inertia"] * np.array([1.0, 1.6, 1.8])
    mass = np.diag([1.1 * m, 1.5 * m, 1.6 * m, *inertia])
    drag = np.diag([p["drag"], 1.6 * p["drag"], 1.8 * p["drag"], 2.0, 3.0, 3.0])
    force = np.zeros((6, 6))
    force[0, :2], force[5, :2] = 1.0, (0.3, -0.3)
    force[1, 2], force[3, 2] = 1.0, 0.05
    force[2, 3:5], force[4, 3:5] = 1.0, (0.25, -0.25)
    force[3, 5] = 0.4
    return second_order(mass, drag, np.diag([0, 0, 0, righting, righting, 0]), force)


FAMILIES = (
    Family(
        "two_link_arm", "robotics", {"mass": 1.0, "length": 0.5, "friction": 0.5, "pose": 0.6,
         "rotor": 0.2},
        _two_links, (0.4, 0.4, 1.0, 1.0), (10.0, 5.0),
    ),
    Family(
        "three_link_arm", "robotics", {"mass": 0.8, "length": 0.4, "friction": 0.5, "pose": 0.7,
         "rotor": 0.2},
        _three_links, (0.3, 0.3, 0.3, 1.0, 1.0, 1.0), (12.0, 8.0, 4.0),
    ),
    Family(
        "six_link_arm", "robotics", {"mass": 0.5, "length": 0.25, "friction": 0.5, "pose": 0.8,
         "rotor": 0.2},
        _six_links, (0.2,) * 6 + (0.8,) * 6, (15.0, 12.0, 9.0, 6.0, 4.0, 2.0),
    ),
    Family(
        "flexible_joint", "robotics",
        {"stiffness": 30.0, "motor_inertia": 0.02, "link_inertia": 0.05, "friction": 0.05,
         "mass": 0.4, "length": 0.25},
        _flexible_joint, (0.4, 0.4, 3.0, 3.0), (4.0,),
    ),
    Family(
        "balancing_robot", "robotics",
        {"body_mass": 1.2, "radius": 0.05, "length": 0.12, "wheel_mass": 0.1,
         "body_inertia": 0.006, "friction": 0.01},
        _balancing, (2.0, 0.15, 5.0, 1.0), (0.5,),
    ),
    Family(
        "path_tracking", "robotics", {"speed": 1.0, "turn_rate": 0.4},
        _path_tracking, (0.3, 0.3, 0.4), (0.6, 1.0),
    ),
    Family(
        "omnidirectional_base", "robotics",
        {"mass": 12.0, "inertia": 0.4, "radius": 0.2, "friction": 3.0},
        _omnidirectional, (0.5, 0.5, 0.5, 0.5, 0.5, 1.0), (15.0, 15.0, 15.0),
    ),
    Family(
        "underwater_robot", "robotics",
        {"mass": 30.0, "inertia": 1.2, "metacentre": 0.02, "drag": 25.0},
        _underwater, (0.5, 0.5, 0.5, 0.2, 0.2, 0.4, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3),
        (20.0, 20.0, 20.0, 15.0, 15.0, 4.0),
    ),
)  # fmt: skip
