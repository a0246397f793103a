"""Windows of optimally controlled linear systems, for learning to control unseen ones.

A round simulates `ROUND` trajectories of every family and writes their windows: the trajectories in
random order, the windows of a trajectory together and in order. The file's layout is that of the
universal LQR transformer's data, with `trajectory_ids`, `variant_ids` and the systems themselves added.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from memconsole.plan.errors import quote
from memconsole.plan.plan import PlanError
from memconsole.units import format_bytes
from memconsole_trainer.data.make.bar import Bar
from memconsole_trainer.data.make.maker import Facts, Request
from memconsole_trainer.data.windows.systems import write_systems
from memconsole_trainer.randomness import generator
from memconsole_trainer.systems.families import FAMILIES
from memconsole_trainer.systems.features import (
    FEATURES,
    MOST_CONTROLS,
    MOST_STATES,
    features,
)
from memconsole_trainer.systems.simulation import Trajectories, optimal, simulate
from memconsole_trainer.systems.variants import Variants, draw

LENGTH = 32
CHUNK_ROWS = 1024
"""Rows of a chunk: 2.4 MiB of windows, read whole and shuffled in memory."""
ROUND = 24
"""Trajectories of each family in a round."""
PILOTS = 200
"""Trajectories of each family that are simulated before writing, for its normalization."""
FILTERS: dict[str, dict[str, Any]] = {
    "none": {},
    "lzf": {"compression": "lzf", "shuffle": True},
    "gzip": {"compression": 4, "shuffle": True},
}
ROW_BYTES = 4 * (LENGTH * FEATURES + 2 * MOST_CONTROLS) + 50 + 8 + 4
PACKED = {"none": 1.0, "lzf": 0.32, "gzip": 0.25}
"""Bytes in the file per byte of rows, by compression; measured."""


class Options(NamedTuple):
    """The options of a request, checked."""

    families: list[str]
    variants: int
    uncertainty: float
    noise: float
    steps: int
    stride: int
    compression: str

    @property
    def windows(self) -> int:
        """Windows of one trajectory."""
        return (self.steps - LENGTH) // self.stride + 1


class Scale(NamedTuple):
    """The largest value of each state (n,) and target control (m,) of a family."""

    states: Any
    controls: Any


def make(request: Request, bar: Bar) -> Facts:
    """Implements `Make`. A size counts windows; whole trajectories are written."""
    import h5py

    options = _options(request)
    trajectories = _trajectories(request, options)
    rows = trajectories * options.windows
    families = [
        draw(FAMILIES[n], options.variants, options.uncertainty, request.seed)
        for n in options.families
    ]
    scales = [_scale(family, options, request.seed) for family in families]
    with h5py.File(request.out, "w", libver="latest") as file:
        file.attrs.update(
            {
                "total_sequences": rows,
                "total_trajectories": trajectories,
                "sequence_length": LENGTH,
                "max_state_dim": MOST_STATES,
                "max_input_dim": MOST_CONTROLS,
                "dimension_encoding_size": FEATURES - MOST_STATES,
                "parameter_uncertainty": options.uncertainty,
                "process_noise_std": options.noise,
                "sequence_stride": options.stride,
                "trajectory_steps": options.steps,
                "seed": request.seed,
            }
        )
        write_systems(file, families, [(s.states, s.controls) for s in scales])
        writer = _Writer(file, rows, options.compression)
        for part in _rounds(families, scales, options, trajectories, request.seed):
            writer.write(part)
            bar.at(writer.row, rows)
    return {
        "windows": rows,
        "trajectories": trajectories,
        "families": len(families),
        "variants": len(families) * options.variants,
        "file_bytes": request.out.stat().st_size,
    }


def _options(request: Request) -> Options:
    given = dict(request.options)
    names = [name for name in str(given.pop("families")).replace(",", " ").split() if name]
    unknown = [name for name in names if name not in FAMILIES]
    if unknown:
        raise PlanError(f"families: {quote(unknown[0])} is none of {', '.join(FAMILIES)}")
    found = Options(names or list(FAMILIES), **given)
    wrong = {
        "variants": not 1 <= found.variants <= 10_000,
        "uncertainty": not 0 <= found.uncertainty <= 0.5,
        "noise": not 0 <= found.noise <= 0.5,
        "steps": not LENGTH <= found.steps <= 100_000,
        "stride": not 1 <= found.stride <= 100_000,
        "compression": found.compression not in FILTERS,
    }
    allowed = {
        "variants": "1 to 10,000",
        "uncertainty": "0 to 0.5",
        "noise": "0 to 0.5",
        "steps": f"{LENGTH} to 100,000",
        "stride": "1 to 100,000",
        "compression": ", ".join(FILTERS),
    }
    for name, is_wrong in wrong.items():
        if is_wrong:
            value = quote(getattr(found, name))
            raise PlanError(f"--set {name} = {value}: expected {allowed[name]}")
    return found


def _trajectories(request: Request, options: Options) -> int:
    """How many trajectories make the wanted size, at least one of each family. Raises `PlanError` if the disk has no
    room for them."""
    row_bytes = ROW_BYTES * PACKED[options.compression]
    size = request.size
    rows = size.count if size.count is not None else (size.size_bytes or 0) / row_bytes
    found = max(round(rows / options.windows), len(options.families))
    needed = found * options.windows * row_bytes
    free = shutil.disk_usage(request.out.parent).free
    if needed > free:
        raise PlanError(
            f"{request.out.parent}: {format_bytes(free)} free, the data take about {format_bytes(needed)}"
        )
    return found


def _drawn(
    variants: Variants, count: int, options: Options, random: Any
) -> tuple[Any, Trajectories]:
    """`count` trajectories of random variants, and the variant of each."""
    chosen = random.integers(variants.count, size=count)
    starts = random.uniform(-1, 1, (count, variants.n_states)) * variants.states
    noise = random.standard_normal((count, options.steps, variants.n_states))
    noise *= options.noise * variants.states
    step, held = variants.steps()
    policy = optimal(variants.k[chosen])
    return chosen, simulate(step[chosen], held[chosen], starts, noise, policy)


def _scale(variants: Variants, options: Options, seed: int) -> Scale:
    random = generator(seed, f"lqr/pilots/{variants.family}")
    found = _drawn(variants, PILOTS, options, random)[1]
    # Controls before the end of the first window are never targets.
    targets = found.controls[:, LENGTH - 1 :]
    return Scale(np.abs(found.states).max((0, 1)), np.abs(targets).max((0, 1)))


class _Rows(NamedTuple):
    """Rows as the file holds them."""

    input_sequences: Any
    controls: Any
    control_masks: Any
    trajectory_ids: Any
    variant_ids: Any
    system_ids: Any


def _rounds(
    families: list[Variants], scales: list[Scale], options: Options, trajectories: int, seed: int
) -> Iterator[_Rows]:
    """All rows, a round of trajectories at a time."""
    of_round = ROUND * len(families)
    for number, first in enumerate(range(0, trajectories, of_round)):
        count = min(of_round, trajectories - first)
        order = generator(seed, f"lqr/{number}/order").permutation(count)
        ids, parts, taken = first + np.argsort(order), [], 0
        for index, (variants, scale) in enumerate(zip(families, scales, strict=True)):
            mine = len(range(index, count, len(families)))
            random = generator(seed, f"lqr/{number}/{variants.family}")
            chosen, found = _drawn(variants, mine, options, random)
            systems = chosen + index * variants.count
            parts.append(
                _windows(found, scale, options, variants, systems, ids[taken : taken + mine])
            )
            taken += mine
        whole = _Rows(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))
        rows = (order[:, None] * options.windows + np.arange(options.windows)).reshape(-1)
        yield _Rows(*(array[rows] for array in whole))


def _windows(
    found: Trajectories, scale: Scale, options: Options, variants: Variants, systems: Any, ids: Any
) -> _Rows:
    """The windows of trajectories (T, steps, ...), normalized, and the control at the last step of each."""
    ends = np.arange(options.windows) * options.stride + LENGTH
    states, controls = found.states / scale.states, found.controls / scale.controls
    cut = np.stack([states[:, end - LENGTH : end] for end in ends], 1)
    count, n_controls = len(ids) * options.windows, variants.n_controls
    targets = np.zeros((count, MOST_CONTROLS), np.float32)
    targets[:, :n_controls] = controls[:, ends - 1].reshape(count, n_controls)
    mask = np.zeros_like(targets)
    mask[:, :n_controls] = 1
    return _Rows(
        features(cut.reshape(count, LENGTH, variants.n_states), n_controls),
        targets,
        mask,
        np.repeat(ids, options.windows),
        np.repeat(systems, options.windows).astype(np.int32),
        np.full(count, variants.family.encode(), dtype="S50"),
    )


class _Writer:
    """Writes rows to a file in whole chunks, so that no chunk is compressed twice."""

    def __init__(self, file: Any, rows: int, compression: str) -> None:
        self.row = 0
        self._rows, self._waiting = rows, list[_Rows]()
        layout = {
            "input_sequences": ((LENGTH, FEATURES), "f4"),
            "controls": ((MOST_CONTROLS,), "f4"),
            "control_masks": ((MOST_CONTROLS,), "f4"),
            "trajectory_ids": ((), "i8"),
            "variant_ids": ((), "i4"),
            "system_ids": ((), "S50"),
        }
        self._datasets = [
            file.create_dataset(
                name,
                (rows, *row),
                dtype,
                chunks=(min(CHUNK_ROWS, rows), *row),
                fletcher32=True,  # a damaged chunk is an error, not other numbers
                **FILTERS[compression],
            )
            for name, (row, dtype) in layout.items()
        ]

    def write(self, rows: _Rows) -> None:
        self._waiting.append(rows)
        whole = _Rows(*(np.concatenate(arrays) for arrays in zip(*self._waiting, strict=True)))
        count = len(whole.controls)
        last = self.row + count == self._rows
        ready = count if last else count // CHUNK_ROWS * CHUNK_ROWS
        for dataset, values in zip(self._datasets, whole, strict=True):
            for start in range(0, ready, CHUNK_ROWS):
                stop = min(start + CHUNK_ROWS, ready)
                dataset[self.row + start : self.row + stop] = values[start:stop]
        self.row += ready
        self._waiting = [_Rows(*(array[ready:] for array in whole))]
