"""What each system's preset learns and takes, in both backends: real runs on data that the console makes.

    python tests/bench/presets.py [--share 0.1] [--only WORD] [--backend NAME] [--seed N]... [--print]

`--share` shortens every run to a share of its steps; a tenth of all takes a few minutes, and is shown alone. The last
evaluation of each run stands beside the baselines that the run measured itself, the measured peak
beside the estimate made before the run. An epoch's minutes are the middle time of the run's steps
times the steps of an epoch. Runs with several seeds show how much of a difference between the
backends is chance. Results go to results/presets.json and into docs/systems.md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from memconsole.runs.read.report.report import RunEvents, read_events
from memconsole.runs.record.directory import RunDirectory
from memconsole.runs.record.log import events
from memconsole.runs.record.log.eventreader import EventReader
from tests.bench.trained import BACKENDS, Settings, into_page, machine, markdown, trained

RESULTS = Path(__file__).with_name("results") / "presets.json"
PAGE = ROOT / "docs" / "systems.md"
"""Shows the tables."""
MIB = 2**20
SEED = 42
"""The presets' own, whose runs make the table."""
BAR = 0.02
"""How far the first measure of the backends may be apart, as a share."""
PARTED = 0.001
COMMON: Settings = {
    "device.name": "cpu",
    "train.log_every": 1,
    "train.sample_tokens": 0,
    "train.answered_records": 16,
}
Numbers = Mapping[str, float]


class Measure(NamedTuple):
    """A figure of the last evaluation, and the same figure of baselines by their names."""

    label: str
    key: str
    baselines: Mapping[str, str]
    digits: int = 3
    higher_is_better: bool = False
    certain: bool = True
    """Whether it is certain enough to be held against its baselines."""

    def beats(self, values: Numbers) -> bool:
        """Whether it is better than each baseline."""
        own, others = values[self.key], [values[key] for key in self.baselines.values()]
        return own > max(others) if self.higher_is_better else own < min(others)


class System(NamedTuple):
    """One preset, its data, and what is reported of it."""

    data: tuple[str, str, str]
    """Kind, file and size of `memconsole data make`."""
    steps: int
    measures: tuple[Measure, ...]


SYSTEMS = {
    "lqr": System(
        ("lqr", "lqr.h5", "100k"),
        1300,
        (
            Measure("masked MSE", "loss", {"no control": "zero_loss", "linear map": "linear_loss"}, 4),
            Measure(
                "x optimal cost, systems trained on",
                "seen_cost_ratio",
                {"no control": "seen_zero_cost_ratio", "linear map": "seen_linear_cost_ratio"},
                2,
            ),
            Measure(
                "x optimal cost, unseen systems",
                "cost_ratio",
                {"no control": "zero_cost_ratio", "linear map": "linear_cost_ratio"},
                2,
                certain=False,  # the median of 24 systems of four plants
            ),
        ),
    ),
    "gearhead-small": System(
        ("equipment", "equipment.jsonl", "20k"),
        1200,
        (
            Measure(
                "token F1",
                "token_f1",
                {"nearest record": "nearest_token_f1", "most frequent": "frequent_token_f1"},
                higher_is_better=True,
            ),
            Measure(
                "exact match",
                "exact_match",
                {"nearest record": "nearest_exact_match", "most frequent": "frequent_exact_match"},
                2,
                higher_is_better=True,
            ),
        ),
    ),
    "efficientids": System(
        ("ratings", "ratings", "100k"),
        480,
        (
            Measure(
                "NDCG@10",
                "ndcg_at_10",
                {"popularity": "popularity_ndcg_at_10", "item-kNN": "knn_ndcg_at_10"},
                higher_is_better=True,
            ),
            Measure(
                "R@10",
                "recall_at_10",
                {"popularity": "popularity_recall_at_10", "item-kNN": "knn_recall_at_10"},
                higher_is_better=True,
            ),
        ),
    ),
    "stories": System(
        ("text", "stories.txt", "20m"),
        600,
        (Measure("bits per byte", "bits_per_byte", {"frequencies of tokens": "unigram_bits"}),),
    ),
}  # fmt: skip


def made(system: System, folder: Path) -> None:
    """Write the system's data into `folder` unless they are there."""
    kind, name, size = system.data
    if (folder / name).exists():
        return
    words = ["data", "make", kind, str(folder / name), "--size", size]
    subprocess.run([sys.executable, "-m", "memconsole", *words], check=True, stdout=sys.stderr)


def measured(preset: str, backend: str, seed: int, share: float, state: Path) -> dict[str, Any]:
    """One run of a preset, from the folder with its data."""
    system = SYSTEMS[preset]
    steps = max(2, round(system.steps * share))
    changes = {"backend": backend, "train.seed": seed, "train.max_steps": steps}
    report = trained({**COMMON, **changes}, state, options=["--preset", preset])
    return summary(preset, report, RunDirectory(state / "memconsole" / "runs" / report["run"]))


def summary(preset: str, report: Mapping[str, Any], run: RunDirectory) -> dict[str, Any]:
    """What is kept of a run."""
    last = report["evaluations"][-1]
    found = {"loss": last["loss"], "bits_per_byte": last["bits_per_byte"], **last["metrics"]}
    if found["bits_per_byte"] and "unigram_loss" in found:
        found["unigram_bits"] = found["unigram_loss"] * found["bits_per_byte"] / found["loss"]
    memory = report["memory"]
    return {
        "steps": last["step"],
        "measures": {
            key: found[key]
            for measure in SYSTEMS[preset].measures
            for key in (measure.key, *measure.baselines.values())
        },
        "losses": {str(e["step"]): e["loss"] for e in report["evaluations"]},
        "training_losses": {
            str(s["step"]): float(f"{s['loss']:.7g}") for s in report["steps"] if not s["step"] % 10
        },
        "estimated_bytes": memory["estimated"]["peak_bytes"],
        "measured_bytes": memory["measured"]["peak_bytes"],
        "epoch_minutes": epoch_minutes(run, read_events(run)),
    }


def epoch_minutes(run: RunDirectory, run_events: RunEvents) -> float:
    """The middle time of a step, evaluations not counted, times the steps of an epoch."""
    seconds = []
    for number in run.attempt_numbers():
        reader, before = EventReader(run.attempt_path(number)), None
        while reader.position != before:
            before = reader.position
            found = reader.read(1 << 20)
            seconds += [r.step_seconds for r in found if isinstance(r, events.Step)]
    steps = run_events.state.steps_per_epoch
    assert steps is not None
    return statistics.median(seconds) * steps / 60


def table(results: Mapping[str, Any]) -> str:
    """A row for each preset and backend."""
    head = ["preset", "backend", "steps", "measures", "baselines"]
    rows = [[*head, "peak estimated, MiB", "measured", "minutes per epoch"]]
    for preset, system in SYSTEMS.items():
        for backend in BACKENDS:
            one = results.get(preset, {}).get(backend, {}).get(str(SEED))
            if one is None:
                continue
            values = one["measures"]
            own, others = [], []
            for m in (m for m in system.measures if m.key in values):
                own.append(f"{m.label} **{values[m.key]:.{m.digits}f}**")
                beside = (f"{n} {values[key]:.{m.digits}f}" for n, key in m.baselines.items())
                others.append(", ".join(beside))
            memory = [f"{one[f'{n}_bytes'] / MIB:,.1f}" for n in ("estimated", "measured")]
            figures = [*memory, f"{one['epoch_minutes']:,.1f}"]
            shown = preset if backend == BACKENDS[0] else ""
            rows.append(
                [shown, backend, str(one["steps"]), "; ".join(own), "; ".join(others), *figures]
            )
    return markdown(rows, left=5)


def apart(results: Mapping[str, Any]) -> str:
    """For each preset, how far backends and seeds are apart."""
    rows = [
        [
            "preset",
            "measure",
            "JAX to torch, same seed",
            "seeds, torch",
            "seeds, JAX",
            "training losses 0.1 % apart at step",
        ]
    ]
    for preset, system in SYSTEMS.items():
        both = [results.get(preset, {}).get(backend, {}) for backend in BACKENDS]
        seeds = [seed for seed in both[0] if seed in both[1]]
        if not seeds:
            continue
        first = system.measures[0]
        pairs = [[runs[seed]["measures"][first.key] for runs in both] for seed in seeds]
        between = ", ".join(f"{jax / torch - 1:+.1%}" for torch, jax in pairs)
        within = [spread([runs[s]["measures"][first.key] for s in runs]) for runs in both]
        parted = ", ".join(parting(both[0][s], both[1][s]) for s in seeds)
        rows.append([preset, first.label, between, *within, parted])
    return markdown(rows, left=2)


def spread(values: list[float]) -> str:
    """Largest over smallest, minus one."""
    return f"{max(values) / min(values) - 1:.1%}" if len(values) > 1 else ""


def parting(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """The first of every tenth step whose training losses differ by more than `PARTED`."""
    ours, theirs = one["training_losses"], other["training_losses"]
    far = (step for step in ours if abs(theirs[step] / ours[step] - 1) > PARTED)
    return next(far, "never")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--share", type=float, default=1.0, help="of the steps of each run")
    parser.add_argument("--only", default="", help="presets whose name has this in it")
    parser.add_argument("--backend", action="append", choices=BACKENDS)
    parser.add_argument("--seed", action="append", type=int, help=f"{SEED} if none is given")
    parser.add_argument("--print", action="store_true", help="the tables of what is stored")
    options = parser.parse_args()
    document: dict[str, Any] = {"results": {}}
    if RESULTS.exists() and options.share == 1:  # shortened runs are no part of what is stored
        document = json.loads(RESULTS.read_text())
    if not options.print:
        _measure_all(options, document)
    tables: dict[str, Callable[[Mapping[str, Any]], str]] = {"presets": table, "apart": apart}
    for name, make in tables.items():
        text = make(document["results"])
        print(text, end="\n\n")
        if options.share == 1:
            into_page(PAGE, name, text)
    far = beyond(document["results"])
    if far:
        sys.exit(f"further apart than {BAR:.0%}: {', '.join(far)}")


def beyond(results: Mapping[str, Any]) -> list[str]:
    """Presets whose backends differ by more than `BAR` in the first measure, on average over the seeds of both, and by
    more than chance explains: two standard errors of that average."""
    found = []
    for preset, backends in results.items():
        ours, theirs = (backends.get(backend, {}) for backend in BACKENDS)
        key = SYSTEMS[preset].measures[0].key
        ratios = [
            theirs[seed]["measures"][key] / ours[seed]["measures"][key]
            for seed in ours
            if seed in theirs
        ]
        error = statistics.stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else 0.0
        if ratios and abs(statistics.mean(ratios) - 1) - 2 * error > BAR:
            found.append(preset)
    return found


def _measure_all(options: Any, document: dict[str, Any]) -> None:
    """Run what is asked for, one run after another. Shortened runs are not stored."""
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for preset in (name for name in SYSTEMS if options.only in name):
            made(SYSTEMS[preset], Path(folder))
            for backend in options.backend or BACKENDS:
                for seed in options.seed or (SEED,):
                    state = Path(folder) / "state"
                    one = measured(preset, backend, seed, options.share, state)
                    rows = document["results"].setdefault(preset, {}).setdefault(backend, {})
                    rows[str(seed)] = one
                    print(preset, backend, seed, one["measures"], file=sys.stderr, flush=True)
                    document.update(command="python tests/bench/presets.py", **machine())
                    if options.share == 1:
                        RESULTS.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
