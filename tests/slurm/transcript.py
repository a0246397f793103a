"""Prints the transcript of docs/scaling.md: a run as a job of a real Slurm, cancelled by it and resumed.

``python tests/slurm/transcript.py``
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from cluster import cluster

SETTINGS = (
    "device.name=cpu model.target_params=100_000 data.max_examples=40 data.vocab_size=512 data.sequence_length=64 "
    "train.batch_size=4 train.max_steps=600 train.checkpoint_every=100 train.sample_tokens=0 train.preflight=false "
    "train.evaluation_batches=4 train.log_every=50"
)


def shell(command: str, environment: dict[str, str]) -> str:
    """Print a command and what it prints. Returns that."""
    print(f"$ {command}", flush=True)
    done = subprocess.run(
        ["bash", "-c", command],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
    )
    print(done.stdout, end="", flush=True)
    return done.stdout


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="memconsole-slurm-") as name:
        folder = Path(name)
        with cluster(folder / "slurm") as made:
            environment = os.environ | made.environment
            environment |= {
                "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
                "XDG_STATE_HOME": f"{folder}/state",
                "OMP_NUM_THREADS": "1",
            }
            sets = " ".join(f"--set {setting}" for setting in SETTINGS.split())
            (folder / "plan.toml").write_text(
                subprocess.run(
                    ["bash", "-c", f"memconsole plan {sets} --toml"],
                    env=environment,
                    capture_output=True,
                    text=True,
                    check=True,
                ).stdout
            )
            os.chdir(folder)
            shell("memconsole train --on slurm --plan plan.toml --name first --detach", environment)
            while (
                "running" not in (seen := _quietly("memconsole runs", environment)) or " 0/" in seen
            ):
                time.sleep(1)
            shell("squeue --format '%i %T %N'", environment)
            shell("memconsole runs", environment)
            shell("scancel 1; memconsole attach first | grep -E 'TRAINING|Why|Steps'", environment)
            shell(
                "memconsole resume first --follow | grep -E 'attempt|job|resumed|TRAINING|Steps'",
                environment,
            )
    return 0


def _quietly(command: str, environment: dict[str, str]) -> str:
    return subprocess.run(
        ["bash", "-c", command], env=environment, capture_output=True, text=True
    ).stdout


if __name__ == "__main__":
    sys.exit(main())
