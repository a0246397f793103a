"""`memconsole data make lqr`: what it writes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from click.testing import CliRunner

from memconsole.cli.main import cli
from memconsole.plan.data.made import Size, kind, parse_options
from memconsole.plan.plan import PlanError
from memconsole_trainer.data.make.__main__ import make
from memconsole_trainer.data.make.maker import Request
from memconsole_trainer.data.windows.systems import read_systems
from memconsole_trainer.systems.features import features
from memconsole_trainer.systems.simulation import optimal, simulate

FAMILIES = "cart_pendulum,yaw_stability,two_masses"


def made(out: Path, size: Size, *options: str, seed: int = 0) -> Any:
    settings = parse_options(kind("lqr"), [f"families={FAMILIES}", "variants=4", *options])
    return make(Request("lqr", out, size, seed, settings))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("made") / "lqr.h5"
    facts = made(path, Size(2500, None), "noise=0")
    assert facts["windows"] == 227 * 11
    assert facts["file_bytes"] == path.stat().st_size
    return path


def test_windows_stay_with_their_trajectory_and_say_their_system(path: Path) -> None:
    with h5py.File(path) as file:
        ids, systems = file["trajectory_ids"][:], file["variant_ids"][:]
        names, families = file["system_ids"][:], read_systems(file)
        assert file.attrs["total_sequences"] == len(ids) == 2497
    np.testing.assert_array_equal(ids, np.repeat(np.arange(227), 11))
    by_trajectory = systems.reshape(227, 11)
    assert (by_trajectory == by_trajectory[:, :1]).all()
    assert [family.variants.family for family in families] == FAMILIES.split(",")
    for family in families:
        own = names == family.variants.family.encode()
        np.testing.assert_array_equal(own, (systems // 4) * 4 == family.first)
        assert own.sum() >= 75 * 11
    assert len(set(systems)) == 12
    assert (np.diff(by_trajectory[:24, 0] // 4) != 0).any()  # families take turns


def test_a_window_follows_from_its_first_state_by_the_stored_matrices(path: Path) -> None:
    with h5py.File(path) as file:
        windows, controls = file["input_sequences"][:], file["controls"][:]
        masks, systems, families = (
            file["control_masks"][:], file["variant_ids"][:], read_systems(file)
        )  # fmt: skip
    for family in families:
        v = family.variants
        mine = np.flatnonzero((systems // v.count) * v.count == family.first)[:40]
        states = windows[mine][:, :, : v.n_states].astype(np.float64)
        chosen = systems[mine] - family.first
        still = np.zeros((len(mine), 32, v.n_states))
        step, held = (matrices[chosen] for matrices in v.steps())
        starts = states[:, 0] * family.state_max
        found = simulate(step, held, starts, still, optimal(v.k[chosen]))
        expected = features(found.states / family.state_max, v.n_controls)
        np.testing.assert_allclose(windows[mine], expected, atol=2e-5)
        told = found.controls[:, -1] / family.control_max
        np.testing.assert_allclose(controls[mine, : v.n_controls], told, atol=2e-4)
        assert (masks[mine] == (np.arange(6) < v.n_controls)).all()
        assert not controls[mine, v.n_controls :].any()


def test_the_same_seed_makes_the_same_file_and_another_another(path: Path, tmp_path: Path) -> None:
    made(tmp_path / "same.h5", Size(2500, None), "noise=0")
    made(tmp_path / "other.h5", Size(2500, None), "noise=0", seed=1)
    assert (tmp_path / "same.h5").read_bytes() == path.read_bytes()
    with h5py.File(path) as file, h5py.File(tmp_path / "other.h5") as other:
        assert not np.array_equal(file["controls"][:], other["controls"][:])


def test_a_size_in_bytes_is_about_that_of_the_file(tmp_path: Path) -> None:
    facts = made(tmp_path / "a.h5", Size(None, 12 << 20), "compression=none")
    assert facts["file_bytes"] == pytest.approx(12 << 20, rel=0.1)


def test_what_cannot_be_made_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    for option, message in (
        ("steps=20", "expected 32 to 100,000"),
        ("compression=zip", "expected none, lzf, gzip"),
        ("families=warp_drive", "is none of mass_spring_damper"),
    ):
        with pytest.raises(PlanError, match=message):
            made(tmp_path / "a.h5", Size(100, None), option)
    with pytest.raises(PlanError, match="the data take about"):
        made(tmp_path / "a.h5", Size(10**13, None))
    assert not list(tmp_path.iterdir())


def test_an_interrupted_command_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "memconsole", "data", "make", "lqr", str(tmp_path / "a.h5")]
    begun = subprocess.Popen(
        [*command, "--size", "2M", "--set", f"families={FAMILIES}"],
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    deadline = time.monotonic() + 60
    while not any(p.stat().st_size > 1_000_000 for p in tmp_path.iterdir()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.killpg(begun.pid, signal.SIGINT)  # as a terminal does
    assert begun.wait(30) != 0
    assert not list(tmp_path.iterdir())


def test_the_command_makes_a_file_once_and_shows_a_bar(tmp_path: Path) -> None:
    out = tmp_path / "a.h5"
    command = [sys.executable, "-m", "memconsole", "data", "make", "lqr", str(out)]
    command += ["--size", "300", "--set", "families=lane_keeping", "--set", "variants=2", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["windows"] == 297
    assert "100 %  297 of 297 windows" in done.stderr
    again = CliRunner().invoke(cli, command[3:])
    assert "exists; choose another name, or replace it with --force" in str(again.exception)
    nowhere = CliRunner().invoke(
        cli, ["data", "make", "lqr", str(tmp_path / "x" / "a.h5"), "--size", "9"]
    )
    assert "there is no folder" in str(nowhere.exception)
    unnamed = CliRunner().invoke(cli, ["data", "make", "lqr", str(tmp_path / "a"), "--size", "9"])
    assert "a file whose name ends with .h5 or .hdf5" in str(unnamed.exception)
    listed = CliRunner().invoke(cli, ["data", "make", "--help"]).output
    assert "HDF5 windows of optimally controlled linear systems" in listed
    assert "uncertainty" in listed
