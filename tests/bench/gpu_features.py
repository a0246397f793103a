"""Whether everything trains on an NVIDIA card: each optimization and each system's preset, in both backends.

    python tests/bench/gpu_features.py [--only WORD] [--workers N]     writes results/gpu_features.json
    python tests/bench/gpu_features.py --device cpu --only plain       the same flow where there is no card; writes nothing

Each is a short real run, `memconsole train`. Shown are the largest difference of a step's loss from the same run in torch
on the CPU, as a share, and the peak of allocated memory beside its estimate. Several runs share the card, so that
nothing is said of speed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = PLACES = [str(ROOT), str(ROOT / "backends")]

from tests.bench.agreement import SMALL
from tests.bench.optimizations import ROWS
from tests.bench.presets import SYSTEMS, made
from tests.bench.trained import BACKENDS, RefusedError, Settings, machine, markdown, trained

RESULTS = Path(__file__).with_name("results") / "gpu_features.json"
MIB = 2**20
STEPS = 12
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
    "average of weights": {"train.average_decay": 0.9},
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
}  # fmt: skip


class Work(NamedTuple):
    """One run."""

    name: str
    backend: str
    device: str
    settings: Settings
    options: tuple[str, ...] = ()
    folder: str = "."
    """Where it starts: a preset's data are there."""
    reference: bool = False
    """Whether it is the run in torch on the CPU."""


def works(device: str, only: str, folder: Path) -> list[Work]:
    """Every run: the rows on the card and in torch on the CPU, then the presets."""
    references, found = [], []
    for preset in SYSTEMS:
        if only in preset:
            for backend in BACKENDS:
                options = "--preset", preset
                found.append(Work(preset, backend, device, SHORT, options, str(folder / "data")))
    for name, changes in {**ROWS, **MORE}.items():
        if only not in name:
            continue
        settings = {**SMALL, **SHORT, **changes}
        model = str(settings.get("model.name", ""))
        if model.startswith("{"):
            settings["model.name"] = str(folder / model.strip("{}"))
            settings.pop("model.target_params", None)
        found += [Work(name, backend, device, settings) for backend in BACKENDS]
        alone = {**settings, "device.threads": 1}
        references.append(Work(name, "torch", "cpu", alone, reference=True))
    return found + references


def one(work: Work, folder: Path) -> dict[str, Any]:
    """Losses by step, evaluations and bytes of a run; or a `problem`."""
    start = time.monotonic()
    settings = {**work.settings, "backend": work.backend, "device.name": work.device}
    with tempfile.TemporaryDirectory(dir=folder, ignore_cleanup_errors=True) as state:
        try:
            report = trained(settings, Path(state), options=work.options, folder=work.folder)
        except RefusedError as error:
            return {"refused": str(error)}
        except RuntimeError as error:
            return {"problem": str(error)[-3000:], "seconds": time.monotonic() - start}
    memory = report["memory"]
    return {
        "losses": {str(s["step"]): s["loss"] for s in report["steps"]},
        "evaluation": report["evaluations"][-1]["loss"],
        "estimated_bytes": memory["estimated"]["peak_bytes"],
        "measured_bytes": memory["measured"]["peak_bytes"],
        "estimated_device_bytes": memory["estimated"]["device_bytes"],
        "measured_device_bytes": memory["measured"]["device_bytes"],
        "device": report["device"],
        "seconds": time.monotonic() - start,
    }


def difference(ours: dict[str, Any], reference: dict[str, Any] | None) -> str:
    """The largest difference of a step's loss, as a share."""
    if not reference or "losses" not in reference:
        return ""
    both = ours["losses"].keys() & reference["losses"].keys()
    return f"{max(abs(ours['losses'][s] / reference['losses'][s] - 1) for s in both):.2%}"


def table(results: dict[str, dict[str, Any]]) -> str:
    rows = [["run", "backend", "loss differs by", "last loss", "MiB", "estimated"]]
    for name, found in results.items():
        for backend in BACKENDS:
            run = found.get(backend)
            if run is None:
                continue
            if "losses" not in run:
                said = (run.get("refused") or run["problem"]).strip().splitlines()[-1]
                rows.append(
                    [
                        name,
                        backend,
                        "",
                        f"{'refused' if 'refused' in run else 'FAILED'}: {said[:90]}",
                        "",
                        "",
                    ]
                )
                continue
            last = run["losses"][max(run["losses"], key=int)]
            sizes = (f"{run[f'{key}_bytes'] / MIB:,.1f}" for key in ("measured", "estimated"))
            rows.append(
                [name, backend, difference(run, found.get("reference")), f"{last:.4f}", *sizes]
            )
    return markdown(rows, left=2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--only", default="")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--seconds", type=float, help="what is not finished by then is left out")
    options = parser.parse_args()
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([*PLACES, *([before] if before else [])])
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as made_here:
        folder = Path(made_here)
        for name, shape in SHAPES.items():
            (folder / name).mkdir()
            (folder / name / "config.json").write_text(json.dumps(shape))
        (folder / "data").mkdir()
        for preset, system in SYSTEMS.items():
            if options.only in preset:
                made(
                    system._replace(data=(*system.data[:2], SIZES[system.data[0]])), folder / "data"
                )
        pool = ThreadPoolExecutor(options.workers)
        wanted = works(options.device, options.only, folder)
        asked = {pool.submit(one, work, folder): work for work in wanted}
        finished = as_completed(asked, timeout=options.seconds)
        with contextlib.suppress(TimeoutError):
            for answer in finished:
                work, found = asked[answer], answer.result()
                who = "reference" if work.reference else work.backend
                results.setdefault(work.name, {})[who] = found
                said = found.get("problem", "")
                print(
                    f"{work.name}: {who}: {found.get('seconds', 0):.0f} s {said}",
                    file=sys.stderr,
                    flush=True,
                )
        pool.shutdown(wait=False, cancel_futures=True)
        results = {work.name: results[work.name] for work in wanted if work.name in results}
    print(table(results))
    if options.device != "cpu":
        facts = {"command": "python tests/bench/gpu_features.py", **machine()}
        RESULTS.write_text(json.dumps(facts | {"results": results}, indent=1) + "\n")
    sys.stdout.flush()
    os._exit(0)  # without waiting for runs that are left out


if __name__ == "__main__":
    main()
