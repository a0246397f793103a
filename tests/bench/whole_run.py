"""nanoGPT's README run for a CPU from the command to its end, beside the same run of memconsole: seconds and loss.

    NANOGPT_DIR=… python tests/bench/whole_run.py [--rounds 2] [--steps 2000] [--print]

All three train the same model on the same text for 2,000 steps with the same schedule, evaluate 20 batches of
training and of held-out text every 250 steps, and save checkpoints as they do by default. They take turns. memconsole
begins without anything cached: its seconds include tokenizing the text and, in JAX, compiling. nanoGPT's files of tokens
are made before its command, and it logs every step, as in its README. At the end the last weights of each are evaluated on
the whole held-out text, by nanoGPT's own model.
Results go to results/whole_run_amd.json or results/whole_run_intel.json, by the processor's maker, and into docs/speed.md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.bench import peer_runs
from tests.bench.peer_runs import Work
from tests.bench.peers import CASES, PAGE
from tests.bench.trained import (
    BACKENDS,
    MAKERS,
    into_page,
    machine,
    maker,
    markdown,
    results_of,
    trained,
)

RESULTS = results_of("whole_run", maker())
CASE = CASES[0]
EVALUATED_EVERY, BATCHES = 250, 20
OURS: dict[str, object] = {
    "data.validation_fraction": 0.1,
    "data.held_out": "last",
    "train.learning_rate": 1e-3,
    "train.beta2": 0.99,
    "train.warmup_steps": 100,
    "train.evaluate_every": EVALUATED_EVERY,
    "train.evaluation_batches": BATCHES,
    "train.evaluation_train_batches": BATCHES,
    "train.log_every": 10,
}
"""As nanoGPT's README and its config/train_shakespeare_char.py have it. The last tenth of the text is held out."""
PEER = {
    "eval_interval": EVALUATED_EVERY,
    "eval_iters": BATCHES,
    "learning_rate": 1e-3,
    "min_lr": 1e-4,
    "beta2": 0.99,
    "warmup_iters": 100,
}


def measured(rounds: int, steps: int) -> dict[str, Any]:
    """Seconds and the loss at the end of each round, by who ran it."""
    found: dict[str, list[dict[str, float]]] = {}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            work = peer_runs.prepare(Path(folder), CASE.shape, CASE.rows, CASE.length, steps, False)
            began = time.perf_counter()
            peer_runs.nanogpt(work, PEER | {"lr_decay_iters": steps})
            seconds = time.perf_counter() - began
            made = work.place / "nano" / "out" / "ckpt.pt"
            found.setdefault(CASE.peer, []).append({"seconds": seconds, "loss": _loss(work, made)})
            for backend in BACKENDS:
                found.setdefault(backend, []).append(_ours(work, backend))
    return {"steps": steps, "runs": found}


def _ours(work: Work, backend: str) -> dict[str, float]:
    state = work.place / f"state-{backend}"
    changes = peer_runs.settings(work, backend) | OURS
    began = time.perf_counter()
    report = trained(changes, state, {"XDG_CACHE_HOME": str(work.place / f"cache-{backend}")})
    seconds = time.perf_counter() - began
    made = work.place / f"exported-{backend}"
    command = [sys.executable, "-m", "memconsole", "export", report["run"], str(made)]
    subprocess.run(
        [*command, "--checkpoint", "last"],
        check=True,
        capture_output=True,
        env={**os.environ, "XDG_STATE_HOME": str(state)},
    )
    return {"seconds": seconds, "loss": _loss(work, made / "model.safetensors")}


def _loss(work: Work, weights: Path) -> float:
    """The mean loss of `weights` over the held-out text, in rows one after another."""
    command = [sys.executable, "-c", _EVALUATED, str(weights), json.dumps(work.shape)]
    done = subprocess.run(
        command, cwd=work.place / "nano", stdout=subprocess.PIPE, text=True, check=True
    )
    return float(done.stdout.splitlines()[-1])


_EVALUATED = """
import json, sys
import numpy as np, torch
from model import GPT, GPTConfig

path, shape = sys.argv[1], json.loads(sys.argv[2])
if path.endswith(".pt"):
    weights = torch.load(path, weights_only=False)["model"]
else:
    from safetensors.torch import load_file
    weights = load_file(path)
    for name in list(weights):
        if name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
            weights[name] = weights[name].T.contiguous()  # transformers keeps them transposed
    weights.setdefault("lm_head.weight", weights["transformer.wte.weight"])
length = shape["n_positions"]
sizes = {name: shape[name] for name in ("vocab_size", "n_layer", "n_head", "n_embd")}
model = GPT(GPTConfig(block_size=length, dropout=0.0, bias=True, **sizes)).eval()
missing, more = model.load_state_dict(weights, strict=False)
assert not missing and not [name for name in more if not name.endswith((".attn.bias", ".masked_bias"))], (missing, more)
text = torch.from_numpy(np.fromfile("data/text/val.bin", np.uint16).astype(np.int64))
count = (len(text) - 1) // length
rows, targets = text[: count * length].view(count, -1), text[1 : count * length + 1].view(count, -1)
with torch.no_grad():
    total = sum(model(x, y)[1].item() * len(x) for x, y in zip(rows.split(64), targets.split(64)))
print(total / count)
"""


def table(results: dict[str, Any]) -> str:
    """A row for each of the three."""
    runs = results["runs"]
    rows = [["run", "seconds", "ratio", "loss on held-out text", "ratio"]]
    for who in (CASE.peer, *BACKENDS):
        row = [who if who == CASE.peer else f"memconsole, {who}"]
        for key, digits in (("seconds", 0), ("loss", 3)):
            own = [run[key] for run in runs[who]]
            ratios = sorted(a / b[key] for a, b in zip(own, runs[CASE.peer], strict=True))
            row.append(f"{statistics.median(own):.{digits}f}")
            spread = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
            row.append("" if who == CASE.peer else spread)
        rows.append(row)
    return markdown(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2, help="turns of each (2)")
    parser.add_argument("--steps", type=int, default=2000, help="steps of each run (2000)")
    parser.add_argument("--print", action="store_true", help="write no file")
    options = parser.parse_args()
    if options.steps < 1 or options.steps % EVALUATED_EVERY:
        parser.error(f"--steps: expected a multiple of {EVALUATED_EVERY}")  # where nanoGPT saves
    try:
        results = measured(options.rounds, options.steps)
    except peer_runs.MissingError as error:
        sys.exit(f"nanoGPT is missing: {error}")
    print(table(results))
    if not options.print:
        document = {"command": "python tests/bench/whole_run.py", **machine(), **results}
        RESULTS.write_text(json.dumps(document, indent=1) + "\n")
        if maker() in MAKERS:
            into_page(PAGE, f"whole-run-{maker()}", table(results))


if __name__ == "__main__":
    main()
