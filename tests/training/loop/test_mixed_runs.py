"""Whole runs on mixed and compressed sources, validated on a file: tokens from the disk and resumed runs
change no bit."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from memconsole.runs.record.directory import RunDirectory
from memconsole.runs.record.log import events
from memconsole.runs.record.run_store import create_run
from memconsole_trainer.data import disk_cache
from memconsole_trainer.data.sources import unpacked
from memconsole_trainer.data.text.blocks import token_key
from tests.training.harness.runs import attempt, final, plan, state_hashes, told


def test_the_log_says_which_files_of_a_folder_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "a.txt").write_text("a cat sat on the mat while dogs ran over green hills. " * 40)
    (folder / "a.bin").write_text("some")
    run = create_run(plan(folder, train__max_steps=1, train__preflight=False))
    assert attempt(run) == 0, final(run)
    log = capfd.readouterr().out + "".join(p.read_text() for p in run.path.rglob("out.log"))
    assert "corpus takes 1 text file (2.11 KiB), leaves out 1 .bin\n" in log


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_a_resumed_run_on_kept_tokens_is_an_uninterrupted_one_that_tokenizes(
    backend: str, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(token_key, "LEAST_BYTES", 0)
    rows = [{"text": f"number {n} of the green hills over dogs"} for n in range(90)]
    other, held = tmp_path / "other.jsonl.gz", tmp_path / "held.txt"
    other.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    held.write_text("a cat sat on the mat while dogs ran over green hills. " * 12)

    def made(**changes: Any) -> RunDirectory:
        settings = {
            "data__mix": f"{other}=0.3",
            "data__validation": str(held),
            "train__sample_tokens": 0,
            "train__preflight": False,
        }
        return create_run(plan(text, backend, **settings, **changes))

    whole = made(data__cache_gib=0)
    assert attempt(whole) == 0, final(whole)
    steps = told(whole, events.Step)[-1].step
    assert steps > 20
    assert not list(disk_cache.root().rglob("tokens"))  # only the unpacked table is there

    run = made()
    assert attempt(run, lambda phase, step: step == steps // 3) == 75
    unpacked._HELD.clear()
    kept = {p: p.stat().st_size for p in disk_cache.root().rglob("tokens")}
    assert len(kept) == 2
    assert all(kept.values())
    assert attempt(run, lambda phase, step: step == steps * 2 // 3) == 75
    assert attempt(run) == 0
    assert {p: p.stat().st_size for p in kept} == kept  # nothing was tokenized twice
    assert state_hashes(run) == state_hashes(whole)
    losses = [[(e.step, e.loss) for e in told(r, events.Evaluation)] for r in (run, whole)]
    assert losses[0] == losses[1]
