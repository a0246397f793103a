"""Whether everything trains on an NVIDIA card: each optimization and each system's preset, in both backends.

    python tests/bench/gpu_features.py [--only WORD] [--workers TORCH JAX REFERENCE]    writes results/gpu_features.json
    python tests/bench/gpu_features.py --device cpu --only plain                        where there is no card; writes nothing

Each is a short run of the trainer. Shown are the largest difference of a step's loss from the same run in torch on the
CPU, as a share, and in torch the peak of allocated memory beside its estimate. Several processes share the card and
each trains one run after another (gpu_features_run.py), so that nothing is said of speed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = PLACES = [str(ROOT), str(ROOT / "backends")]

from memconsole.plan.plan import Plan, replace
from memconsole.runs.act.environment import trainer_environment
from tests.bench.agreement import SMALL
from tests.bench.optimizations import ROWS
from tests.bench.presets import SYSTEMS, made
from tests.bench.trained import BACKENDS, Settings, assignments, machine, markdown

RESULTS = Path(__file__).with_name("results") / "gpu_features.json"
WORKER = Path(__file__).with_name("gpu_features_run.py")
MIB = 2**20
DAY = 86400.0
REFERENCE = "reference"
STEPS = 12
WORKERS = (4, 3, 2)
"""Processes for torch and JAX on the card and for the reference, on a machine of 16 cores. JAX compiles the most."""
FAR = 0.02
"""Differences of losses above it are listed. On a card, fp32 rows multiply in TF32."""
SIZES = {"lqr": "5k", "equipment": "2k", "ratings": "20k", "text": "2m"}
"""Of the data that are made for the presets."""
SHORT: Settings = {
    "train.max_steps": STEPS,
    "train.log_every": 1,
    "train.evaluation_batches": 2,
    "train.sample_tokens": 0,
    "train.answered_records": 4,
}
MORE: dict[str, Settings] = {
    "deterministic": {"train.deterministic": True},
    "dropout": {"train.dropout": 0.1},
    "average of weights": {"train.ema_decay": 0.9},
    "bf16, optimizer offload": {"optimize.precision": "bf16", "optimize.optimizer_offload": "pinned"},
    "bf16, compiled, chunked": {"optimize.precision": "bf16", "optimize.compile": True, "optimize.fused_loss": True},
    "bf16, activation offload, checkpointing": {
        "optimize.precision": "bf16",
        "optimize.activation_offload": True,
        "optimize.gradient_checkpointing": "full",
    },
    "bf16, isolated documents": {"optimize.precision": "bf16", "data.isolate_documents": True},
    "hybrid": {"hybrid.mode": "balanced", "hybrid.warmup_steps": 4, "hybrid.memory": "compress"},
    "Gemma 3, bf16": {"optimize.precision": "bf16", "model.name": "{gemma3}"},
    "Qwen 3, bf16": {"optimize.precision": "bf16", "model.name": "{qwen3}"},
    "mixture of experts": {"model.name": "{qwen3moe}"},
    "mixture of experts, bf16": {"optimize.precision": "bf16", "model.name": "{qwen3moe}"},
    "mixture of experts, bf16, Muon, chunked": {
        "optimize.precision": "bf16",
        "optimize.optimizer": "muon",
        "optimize.fused_loss": True,
        "model.name": "{qwen3moe}",
    },
}  # fmt: skip
SHAPES: dict[str, dict[str, object]] = {
    "gemma3": {
        "model_type": "gemma3_text", "vocab_size": 2048, "hidden_size": 128, "intermediate_size": 256,
        "num_hidden_layers": 7, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 64,
        "query_pre_attn_scalar": 64, "sliding_window": 32, "max_position_embeddings": 256,
        "hidden_activation": "gelu_pytorch_tanh",
    },
    "qwen3": {
        "model_type": "qwen3", "vocab_size": 2048, "hidden_size": 128, "intermediate_size": 256,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
        "max_position_embeddings": 256, "tie_word_embeddings": True,
    },
    "qwen3moe": {
        "model_type": "qwen3_moe", "vocab_size": 2048, "hidden_size": 128, "moe_intermediate_size": 64,
        "num_experts": 16, "num_experts_per_tok": 4, "norm_topk_prob": True, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 256,
        "max_position_embeddings": 256, "tie_word_embeddings": True,
    },
}  # fmt: skip


class Work(NamedTuple):
    """One run."""

    name: str
    who: str
    """The backend, or `REFERENCE`."""
    device: str
    settings: Settings
    preset: str | None = None

    @property
    def alone(self) -> bool:
        """Whether it has settings that a framework reads when it opens its device."""
        return bool(self.settings.get("train.deterministic")) and self.who != REFERENCE

    @property
    def order(self) -> int:
        """Those that take long come first."""
        return 0 if self.alone or self.settings.get("optimize.compile") else 2 - bool(self.preset)


def works(device: str, only: str, folder: Path) -> list[Work]:
    """Every run: the presets, the rows on the card, and the rows in torch on the CPU."""
    found = [
        Work(preset, backend, device, SHORT, preset)
        for preset in SYSTEMS
        for backend in BACKENDS
        if only in preset
    ]
    for name, changes in {**ROWS, **MORE}.items():
        if only not in name:
            continue
        settings = {**SMALL, **SHORT, **changes}
        model = str(settings.get("model.name", ""))
        if model.startswith("{"):
            settings["model.name"] = str(folder / model.strip("{}"))
            settings.pop("model.target_params", None)
        found += [Work(name, backend, device, settings) for backend in BACKENDS]
        plain = {key: value for key, value in settings.items() if key != "optimize.compile"}
        found.append(Work(name, REFERENCE, "cpu", {**plain, "device.threads": 1}))
    return found


class Worker:
    """A process that trains one run after another."""

    def __init__(self, work: Work, folder: Path) -> None:
        backend = "torch" if work.who == REFERENCE else work.who
        # Compiled or not: the environment says only where compiled code is kept.
        kept = {"optimize.compile": True} if backend == "torch" else {}
        self._backend = backend
        plan = replace(Plan(), {"backend": backend, "device.name": work.device, **kept})
        state = {**os.environ, "XDG_STATE_HOME": str(folder / "state")}
        descriptor, name = tempfile.mkstemp(suffix=".log", dir=folder)
        self._log = Path(name)
        self._folder = str(folder / "data")
        with os.fdopen(descriptor, "w") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(WORKER)],
                env=trainer_environment(plan, state),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def run(self, work: Work) -> dict[str, Any]:
        """Losses by step, the last evaluation and bytes; or `refused` or a `problem`."""
        chosen = {"backend": self._backend, "device.name": work.device}
        wanted = {
            "preset": work.preset,
            "assignments": assignments({**work.settings, **chosen}),
            "folder": self._folder,
        }
        start, line = time.monotonic(), ""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(wanted) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            pass
        if line:
            return dict(json.loads(line))
        words = ""
        with contextlib.suppress(FileNotFoundError):  # the time is over
            words = self._log.read_text(errors="replace")[-3000:].strip()
        last = words.splitlines()[-1] if words else "it said nothing"
        problem = f"{words}\nits process ended with {self._process.wait()}: {last}"
        return {"problem": problem, "seconds": time.monotonic() - start}

    @property
    def dead(self) -> bool:
        return self._process.poll() is not None

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


class Pool:
    """Trains runs in several workers, each of one backend and device, and puts what they find into `found`."""

    def __init__(self, wanted: list[Work], workers: dict[str, int], folder: Path) -> None:
        self.found: queue.SimpleQueue[tuple[Work, dict[str, Any]]] = queue.SimpleQueue()
        self._folder = folder
        self._lock = threading.Lock()
        self._workers: set[Worker] = set()
        self._closed = False
        for who, count in workers.items():
            waiting: queue.SimpleQueue[Work] = queue.SimpleQueue()
            for work in sorted((w for w in wanted if w.who == who), key=lambda w: w.order):
                waiting.put(work)
            for _ in range(count):
                threading.Thread(target=self._follow, args=(waiting,), daemon=True).start()

    def close(self) -> None:
        """End all workers, whatever they do."""
        with self._lock:
            self._closed = True
            for worker in self._workers:
                worker.kill()

    def _follow(self, waiting: queue.SimpleQueue[Work]) -> None:
        worker = None
        while True:
            try:
                work = waiting.get_nowait()
            except queue.Empty:
                break
            if worker is not None and (work.alone or worker.dead):
                self._end(worker)
                worker = None
            worker = worker or self._start(work)
            if worker is None:
                return
            self.found.put((work, worker.run(work)))
            if work.alone:
                self._end(worker)
                worker = None
        if worker is not None:
            self._end(worker)

    def _start(self, work: Work) -> Worker | None:
        with self._lock:
            if self._closed:
                return None
            worker = Worker(work, self._folder)
            self._workers.add(worker)
            return worker

    def _end(self, worker: Worker) -> None:
        with self._lock:
            worker.kill()
            self._workers.discard(worker)


def difference(ours: dict[str, Any], reference: dict[str, Any] | None) -> float | None:
    """The largest difference of a step's loss, as a share; infinite if a loss is not finite."""
    if not reference or "losses" not in ours or "losses" not in reference:
        return None
    pairs = [(ours["losses"][s], loss) for s, loss in reference["losses"].items()]
    return max(math.inf if None in pair else abs(pair[0] / pair[1] - 1) for pair in pairs)


def table(results: dict[str, dict[str, Any]]) -> str:
    rows = [["run", "backend", "loss differs by", "last loss", "MiB", "estimated"]]
    for name, found in results.items():
        for backend in (b for b in BACKENDS if b in found):
            run = found[backend]
            if "losses" not in run:
                word = "refused" if "refused" in run else "FAILED"
                rows.append([name, backend, "", f"{word}: {last_line(run)[:90]}", "", ""])
                continue
            far, losses = difference(run, found.get(REFERENCE)), run["losses"]
            last = losses[max(losses, key=int)]
            keys = (f"{key}_bytes" for key in ("measured", "estimated"))
            rows.append(
                [
                    name,
                    backend,
                    "" if far is None else f"{far:.2%}",
                    "not finite" if last is None else f"{last:.4f}",
                    *(f"{run[key] / MIB:,.1f}" if run.get(key) else "" for key in keys),
                ]
            )
    return markdown(rows, left=2)


def last_line(run: dict[str, Any]) -> str:
    """Why a run was refused or failed."""
    said = str(run.get("refused") or run.get("problem", "")).strip()
    return said.splitlines()[-1] if said else ""


def remarks(results: dict[str, dict[str, Any]], left_out: int) -> str:
    """What failed, and what differs from the reference."""
    failed, far = [], []
    for name, found in results.items():
        for who, run in found.items():
            # torch on a CPU trains every row, so that a refused one is wrong.
            if "problem" in run or (who == REFERENCE and "refused" in run):
                failed.append(f"{name} ({who})")
            apart = None if who == REFERENCE else difference(run, found.get(REFERENCE))
            if apart is not None and apart > FAR:
                far.append(f"{name} ({who}, {apart:.1%})")
    lines = [f"losses differ by more than {FAR:.0%}: {', '.join(far) or 'none'}"]
    lines += [f"not finished in time: {left_out} runs"] if left_out else []
    return "\n".join([*lines, f"failed: {', '.join(failed) or 'none'}"])


def collect(
    pool: Pool, count: int, end: float, began: float
) -> dict[tuple[str, str], dict[str, Any]]:
    """What is found of `count` runs until `end`, by name and by who trained; progress is told."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    while len(found) < count:
        try:
            work, run = pool.found.get(timeout=max(0.0, end - time.monotonic()))
        except queue.Empty:
            break
        found[work.name, work.who] = run
        times = f"at {time.monotonic() - began:3.0f} s, took {run['seconds']:4.1f} s"
        print(f"{times}  {work.name} ({work.who}) {last_line(run)}", file=sys.stderr, flush=True)
    return found


def prepare(only: str, folder: Path) -> None:
    """Write the models and the presets' data."""
    for name, shape in SHAPES.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(shape))
    data = folder / "data"
    data.mkdir()
    sized = [
        system._replace(data=(*system.data[:2], SIZES[system.data[0]]))
        for preset, system in SYSTEMS.items()
        if only in preset
    ]
    with ThreadPoolExecutor() as threads:
        for _ in threads.map(lambda system: made(system, data), sized):
            pass


def main() -> None:
    began = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--only", default="", help="runs whose name has this in it")
    parser.add_argument(
        "--workers",
        type=int,
        nargs=3,
        default=WORKERS,
        metavar=("TORCH", "JAX", "REFERENCE"),
        help="processes of each; 0 leaves its runs out",
    )
    parser.add_argument("--seconds", type=float, help="what is not finished by then is left out")
    options = parser.parse_args()
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([*PLACES, *([before] if before else [])])
    workers = dict(zip((*BACKENDS, REFERENCE), options.workers, strict=True))
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as made_here:
        folder = Path(made_here)
        prepare(options.only, folder)
        wanted = [w for w in works(options.device, options.only, folder) if workers[w.who]]
        pool = Pool(wanted, workers, folder)
        end = began + options.seconds if options.seconds else math.inf
        try:
            found = collect(pool, len(wanted), min(end, began + DAY), began)
        finally:
            pool.close()
    results: dict[str, dict[str, Any]] = {}
    for work in wanted:
        if (work.name, work.who) in found:
            results.setdefault(work.name, {})[work.who] = found[work.name, work.who]
    print(table(results))
    print("\n" + remarks(results, len(wanted) - len(found)))
    if options.device != "cpu":
        facts = {"command": "python tests/bench/gpu_features.py", **machine()}
        RESULTS.write_text(json.dumps(facts | {"results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
