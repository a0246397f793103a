"""Each way of ending gets the verdict its evidence supports."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from memconsole.plan import plan as plans
from memconsole.plan.machine import jemalloc
from memconsole.plan.plan import Plan, PlanError
from memconsole.runs.act import environment
from memconsole.runs.act.environment import device_kind, trainer_environment
from memconsole.runs.act.supervise.stop_deadline import LONGEST_SECONDS, SeenDurations, StopDeadline
from memconsole.runs.read.life.verdict import Evidence, classify, gather
from memconsole.runs.record.failures.failure import (
    ExitCode,
    cause_of,
    failure_of,
    words_of_memory,
)
from memconsole.runs.record.failures.oom import oom_kills
from memconsole.runs.record.processes.heartbeat import Heartbeat, HeartbeatWriter, read_heartbeat
from memconsole.runs.record.records import ErrorRecord, FinalRecord, OomCounts
from memconsole.runs.record.run_store import create_run

KILL, BUS, TERM = signal.SIGKILL, signal.SIGBUS, signal.SIGTERM
DONE = FinalRecord(exit_code=0, step=10, reason="finished")
SAVED = FinalRecord(exit_code=75, step=10, reason="stopped", checkpoint="step-10")


def error(cause: str) -> ErrorRecord:
    return ErrorRecord(cause=cause, type="SomeError", message="it broke\nbadly")


@pytest.mark.parametrize(
    ("evidence", "reason", "says", "resumable"),
    [
        (Evidence(exit_code=0, final=DONE), "finished", "step 10", False),
        (Evidence(exit_code=0), "crashed", "without saying that it was done", False),
        (Evidence(exit_code=0, final=SAVED), "crashed", "without saying", True),
        (Evidence(exit_code=75, final=SAVED, stopped_by="me"), "stopped", "by me", True),
        (Evidence(exit_code=75, final=SAVED), "stopped", "by a signal", True),
        (Evidence(exit_code=76, has_checkpoint=True), "fenced", "newer attempt", True),
        (Evidence(exit_code=77, error=error("bad_data")), "bad_data", "it broke", False),
        (Evidence(exit_code=78, has_checkpoint=True), "bad_plan", "plan", False),
        (Evidence(exit_code=79, has_checkpoint=True), "disk_full", "disk", True),
        (Evidence(exit_code=80, has_checkpoint=True), "nan", "not finite", True),
        (Evidence(exit_code=1, error=error("out_of_memory")), "out_of_memory", "it broke", False),
        (Evidence(exit_code=1, error=error("device_lost")), "crashed", "SomeError", False),
        (Evidence(exit_code=3), "crashed", "exit code 3", False),
        (Evidence(exit_code=137), "killed", "SIGKILL", False),
        (
            Evidence(
                signal=KILL,
                oom_before=OomCounts(host=2, cgroup=0),
                oom_now=OomCounts(host=3, cgroup=1),
            ),
            "host_out_of_memory",
            "oom_kill 0 → 1",
            False,
        ),
        (
            Evidence(signal=KILL, oom_before=OomCounts(host=2), oom_now=OomCounts(host=4)),
            "host_out_of_memory",
            "2 out-of-memory kills (oom_kill 2 → 4)",
            False,
        ),
        (
            Evidence(
                signal=KILL,
                oom_before=OomCounts(host=2, cgroup=0),
                oom_now=OomCounts(host=3, cgroup=0),
            ),
            "killed",
            "another cgroup",
            False,
        ),
        (
            Evidence(signal=KILL, oom_before=OomCounts(host=2), oom_now=OomCounts(host=2)),
            "killed",
            "no out-of-memory kill",
            False,
        ),
        (Evidence(signal=KILL), "killed", "not counted", False),
        (
            Evidence(signal=KILL, killed_by="me", kill_note="too long"),
            "killed",
            "by me before it said anything: too long",
            False,
        ),
        (Evidence(signal=TERM, stopped_by="me"), "stopped", "before it could save", True),
        (Evidence(signal=TERM, final=SAVED), "stopped", "saved as step-10", True),
        (Evidence(signal=TERM, final=DONE, stopped_by="me"), "finished", "at step 10", False),
        (Evidence(exit_code=143, final=SAVED), "stopped", "saved as step-10", True),
        (Evidence(signal=TERM), "killed", "SIGTERM", False),
        (Evidence(signal=BUS), "crashed", "/dev/shm", False),
        (
            Evidence(signal=signal.SIGABRT, error=error("out_of_memory")),
            "out_of_memory",
            "it broke",
            False,
        ),
        (
            Evidence(signal=signal.SIGABRT, words_of_memory="memory allocation of 9 bytes failed"),
            "out_of_memory",
            "9 bytes",
            False,
        ),
        (
            Evidence(exit_code=127, words_of_memory="cannot allocate memory for thread-local data"),
            "out_of_memory",
            "thread-local",
            False,
        ),
        (
            Evidence(exit_code=1, last_line="libgomp: Thread creation\x1b[0m failed"),
            "crashed",
            "see out.log, which ends with: libgomp: Thread creation failed",
            False,
        ),
        (Evidence(final=SAVED), "stopped", "its own last record", True),
        (Evidence(error=error("nan")), "nan", "it broke", False),
        (Evidence(rebooted=True, has_checkpoint=True), "rebooted", "restarted", True),
        (
            Evidence(oom_before=OomCounts(host=0), oom_now=OomCounts(host=1)),
            "host_out_of_memory",
            "without a record",
            False,
        ),
        (Evidence(), "unknown", "exit code unknown", False),
        (Evidence(elsewhere="other"), "unknown", "started on other", False),
        (
            Evidence(heartbeat=Heartbeat(1, 1, 42, 0, "train")),
            "unknown",
            "step 42, phase train",
            False,
        ),
    ],
)
def test_verdict(evidence: Evidence, reason: str, says: str, resumable: bool) -> None:
    found = classify(evidence)
    assert (found.reason, found.resumable) == (reason, resumable)
    assert says in found.evidence
    assert "\n" not in found.evidence


@pytest.mark.parametrize(
    ("kind", "message", "says"),
    [
        (
            "OutOfMemoryError",
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.6 GiB",
            "it asked for 2.00 GiB, more GPU memory than is left, at step 42, phase train",
        ),
        (
            "RuntimeError",
            "[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you "
            "tried to allocate 2097152 bytes. Error code 12",
            "it asked for 2.00 MiB, more host RAM than is left, at step 42, phase train",
        ),
        (
            "JaxRuntimeError",
            "RESOURCE_EXHAUSTED: Out of memory allocating 4194304 bytes.",
            "it asked for 4.00 MiB, more memory than is left, at step 42, phase train",
        ),
        (
            "PreflightError",
            "the training step (4 rows) asked for 2.00 MiB, more host RAM than is left\nlower it",
            "the training step (4 rows) asked for 2.00 MiB, more host RAM than is left",
        ),
    ],
)
def test_a_lack_of_memory_is_one_plain_sentence(kind: str, message: str, says: str) -> None:
    record = ErrorRecord(cause="out_of_memory", type=kind, message=message)
    found = classify(Evidence(exit_code=1, error=record, heartbeat=Heartbeat(1, 1, 42, 0, "train")))
    assert (found.reason, found.evidence) == ("out_of_memory", says)


class OutOfMemoryError(RuntimeError):
    """Named as torch names it."""


def chained() -> BaseException:
    try:
        try:
            raise MemoryError("inner")
        except MemoryError as inner:
            raise ValueError("outer") from inner
    except ValueError as outer:
        return outer


@pytest.mark.parametrize(
    ("exception", "cause", "code"),
    [
        (OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "out_of_memory", 1),
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory"), "out_of_memory", 1),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"),
            "out_of_memory",
            1,
        ),
        (MemoryError("Unable to allocate 3 TiB"), "out_of_memory", 1),
        (OSError(12, "Cannot allocate memory"), "out_of_memory", 1),
        (OSError(28, "No space left on device"), "disk", 79),
        (OSError(122, "Disk quota exceeded"), "disk", 79),
        (RuntimeError("CppCompileError: ld: cannot write: No space left on device"), "disk", 79),
        (PlanError("bad"), "bad_plan", 78),
        (RuntimeError("CUDA error: GPU is lost"), "device_lost", 1),
        (ValueError("x"), "crashed", 1),
        (chained(), "out_of_memory", 1),
    ],
)
def test_cause_of_an_exception(exception: BaseException, cause: str, code: int) -> None:
    assert cause_of(exception) == cause
    assert failure_of(cause).code == code


def test_an_exception_may_name_its_cause() -> None:
    problem = ValueError("row 3 is torn")
    problem.cause = "bad_data"  # type: ignore[attr-defined]
    assert failure_of(cause_of(problem)).code is ExitCode.BAD_DATA


def test_oom_kills_are_read_from_either_kind_of_cgroup(tmp_path: Path) -> None:
    assert oom_kills(tmp_path) == OomCounts()
    proc = tmp_path / "proc/self"
    proc.mkdir(parents=True)
    (tmp_path / "proc/vmstat").write_text("pgfault 1\noom_kill 7\noom_kill_other 9\n")
    (proc / "cgroup").write_text("0::/user.slice/a.scope\n")
    assert oom_kills(tmp_path) == OomCounts(host=7, cgroup=None)
    group = tmp_path / "sys/fs/cgroup/user.slice/a.scope"
    group.mkdir(parents=True)
    (group / "memory.events").write_text("low 0\noom 4\noom_kill 3\noom_group_kill 0\n")
    assert oom_kills(tmp_path) == OomCounts(host=7, cgroup=3)
    (proc / "cgroup").write_text("9:name=systemd:/\n4:memory:/inside\n0::/\n")
    old = tmp_path / "sys/fs/cgroup/memory"
    old.mkdir(parents=True)
    # In a container the path is the host's; the mount is the container's own group.
    (old / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 5\n")
    assert oom_kills(tmp_path) == OomCounts(host=7, cgroup=5)


def test_a_stop_may_take_as_long_as_steps_and_saves_have_taken() -> None:
    durations = SeenDurations()
    now = 0.0
    for step in range(1, 4):
        now += 50.0
        durations.see(Heartbeat(step, 0, step, 0, "train"), now)
    for written in (1, 2, 3):
        now += 10.0
        assert durations.see(Heartbeat(9, 0, 3, written, "checkpoint"), now)
    now += 10.0
    durations.see(Heartbeat(10, 0, 3, 3, "train"), now)
    assert durations.slow_step_seconds == 50.0
    assert durations.save_seconds == 30.0
    assert durations.patience_seconds() == 3 * 30.0 + 2 * 50.0
    assert durations.patience_seconds(urgent=True) == 90.0
    assert SeenDurations().patience_seconds() == 60.0


def test_a_deadline_moves_with_the_bytes_but_not_for_ever() -> None:
    deadline = StopDeadline(100.0, 60.0)
    assert deadline.at == 160.0
    deadline.moved(150.0)
    assert deadline.at == 210.0
    deadline.hurry(160.0, 20.0)
    assert deadline.at == 180.0
    for now in range(170, 2000, 10):
        deadline.moved(float(now))
    assert deadline.at == 100.0 + LONGEST_SECONDS


def test_a_heartbeat_is_64_checked_bytes(tmp_path: Path) -> None:
    assert read_heartbeat(tmp_path) is None
    writer = HeartbeatWriter(tmp_path)
    writer.beat("evaluate", 2**40, 2**50, 12.5)
    writer.beat("a phase name that is too long", 7, 1, 13.0)
    beat = read_heartbeat(tmp_path)
    assert beat == Heartbeat(2, 13_000_000_000, 7, 1, "a phase name tha")
    path = tmp_path / "heartbeat"
    content = path.read_bytes()
    assert len(content) == 64
    for position in range(60):
        path.write_bytes(
            content[:position] + bytes([content[position] ^ 4]) + content[position + 1 :]
        )
        assert read_heartbeat(tmp_path) is None
    writer.close()


def test_the_environment_fits_the_device_and_keeps_what_a_person_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plans.replace(Plan(), {"device.name": "cpu"})
    made = trainer_environment(plan, {"MALLOC_ARENA_MAX": "8", "PATH": "/bin"}, "id", 3)
    assert made["MALLOC_ARENA_MAX"] == "8"
    assert made["MALLOC_TRIM_THRESHOLD_"] == str(2**40)
    tight = trainer_environment(plans.replace(plan, {"optimize.heap": "tight"}), {})
    assert tight["MALLOC_TRIM_THRESHOLD_"] == "131072"
    by_jax = trainer_environment(plans.replace(plan, {"backend": "jax"}), {})
    assert by_jax["MALLOC_ARENA_MAX"] == "1"
    assert made["MALLOC_TOP_PAD_"] == str(64 << 20)
    assert made["MALLOC_MMAP_MAX_"] == "0"
    assert not {"MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_"} & set(tight | by_jax)
    assert (made["GOMP_SPINCOUNT"], by_jax.get("GOMP_SPINCOUNT")) == ("10000", None)
    assert "GOMP_SPINCOUNT" not in trainer_environment(plan, {"OMP_WAIT_POLICY": "active"})
    assert made["PATH"] == "/bin"
    assert (made["MEMCONSOLE_RUN_ID"], made["MEMCONSOLE_ATTEMPT"]) == ("id", "3")
    assert made["PYTHONUNBUFFERED"] == "1"
    assert "PYTORCH_ALLOC_CONF" not in made
    assert made["TOKENIZERS_PARALLELISM"] == "true"
    single = {"TOKENIZERS_PARALLELISM": "false"}
    assert trainer_environment(plan, single)["TOKENIZERS_PARALLELISM"] == "false"
    packed = plans.replace(plan, {"optimize.heap": "jemalloc"})
    assert "LD_PRELOAD" not in trainer_environment(packed, {}, kind="cuda")
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / jemalloc.FILE).touch()
    found = jemalloc.library(tmp_path, tmp_path)
    monkeypatch.setattr(jemalloc, "library", lambda: found)
    made = trainer_environment(packed, {"LD_PRELOAD": "/other.so"})
    assert made["LD_PRELOAD"] == f"{tmp_path}/lib/libjemalloc.so.2:/other.so"
    assert "MALLOC_TRIM_THRESHOLD_" not in made
    gpu = trainer_environment(plan, {}, kind="cuda")
    assert gpu["PYTORCH_ALLOC_CONF"].startswith("expandable_segments:True")
    for version, rounded in (("2.11.0+cu130", True), ("2.13.0", False), ("3.0.1", False)):
        monkeypatch.setattr(environment.metadata, "version", lambda _, version=version: version)
        settings = trainer_environment(plan, {}, kind="cuda")["PYTORCH_ALLOC_CONF"]
        assert ("pinned_max_round_threshold_mb:1" not in settings) == rounded
    assert "MALLOC_ARENA_MAX" not in gpu
    own = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}
    assert "PYTORCH_ALLOC_CONF" not in trainer_environment(plan, own, kind="cuda")
    jax = plans.replace(plan, {"backend": "jax", "device.memory_fraction": 0.5})
    made = trainer_environment(jax, {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.9"}, kind="cuda")
    assert made["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
    assert made["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.5"
    assert trainer_environment(jax, {})["JAX_PLATFORMS"] == "cpu"
    compiled = plans.replace(plan, {"optimize.compile": True})
    cache = trainer_environment(compiled, {"XDG_CACHE_HOME": str(tmp_path)})
    assert cache["TORCHINDUCTOR_CACHE_DIR"] == f"{tmp_path}/memconsole/inductor"


@pytest.mark.parametrize(
    ("name", "files", "platform", "kind"),
    [
        ("auto", [], "linux", "cpu"),
        ("auto", ["nvidiactl"], "linux", "cuda"),
        ("auto", ["kfd"], "linux", "rocm"),
        ("auto", ["nvidiactl", "kfd"], "linux", "cuda"),
        ("auto", ["accel0"], "linux", "tpu"),
        ("auto", [], "darwin", "apple"),
        ("cpu", ["nvidiactl"], "linux", "cpu"),
        ("cuda:1", [], "linux", "cuda"),
        ("cuda:0", ["kfd"], "linux", "rocm"),
        ("mps", [], "darwin", "apple"),
        ("tpu", [], "linux", "tpu"),
    ],
)
def test_the_kind_of_device_is_told_without_a_driver(
    tmp_path: Path, name: str, files: list[str], platform: str, kind: str
) -> None:
    for file in files:
        (tmp_path / file).touch()
    plan = plans.replace(Plan(), {"device.name": name})
    assert device_kind(plan, tmp_path, platform) == kind


@pytest.mark.parametrize(
    ("output", "line"),
    [
        ("step 1\nterminate called\n  what():  std::bad_alloc\n", "what():  std::bad_alloc"),
        (
            "memory allocation of 81920 bytes failed\nstack backtrace:\n",
            "memory allocation of 81920 bytes failed",
        ),
        ("LLVM ERROR: out of memory\nAllocation failed\n", "LLVM ERROR: out of memory"),
        ("peak memory allocation of the model: 4 MiB\nSegmentation fault\n", ""),
    ],
)
def test_a_librarys_last_words_about_memory_are_found(output: str, line: str) -> None:
    assert words_of_memory(output) == line


def test_the_last_line_of_the_output_is_evidence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    run = create_run(Plan())
    number = run.new_attempt()
    (run.attempt_path(number) / "out.log").write_text("begins\nlibgomp: no threads\n\n")
    assert gather(run, number, exit_code=1).last_line == "libgomp: no threads"
