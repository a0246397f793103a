"""A followed run is one story: incremental, resumable from its snapshot, and honest about pace and stalls."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memconsole.cli.runs import logs
from memconsole.cli.runs.progress import ProgressLines
from memconsole.plan.plan import Plan, apply_settings
from memconsole.runs.read import follow, history
from memconsole.runs.read.curves.curve import Curve
from memconsole.runs.read.follow import Follower, status
from memconsole.runs.read.life.liveness import Liveness
from memconsole.runs.read.report.report import report
from memconsole.runs.read.state.pace import eta_seconds, seconds_per_step
from memconsole.runs.read.state.reduce import RunState, reduce
from memconsole.runs.read.state.saved_state import SavedState, write_saved
from memconsole.runs.read.state.stages import stage_words
from memconsole.runs.read.state.stall import stall_limit_seconds
from memconsole.runs.record.directory import RunDirectory
from memconsole.runs.record.log import events
from memconsole.runs.record.log.eventlog import EventWriter
from memconsole.runs.record.processes.heartbeat import HeartbeatWriter
from memconsole.runs.record.run_store import create_run
from tests.unit.runs.written import started


class Clock:
    """A clock that only moves when told."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return create_run(Plan(), "a test")


@pytest.fixture
def clock() -> Clock:
    return Clock()


class Trainer:
    """Writes the events of one attempt as a trainer would."""

    def __init__(self, run: RunDirectory, clock: Clock, segment_bytes: int = 16 << 20) -> None:
        self.run, self.clock = run, clock
        self.number = run.new_attempt()
        self.path = run.attempt_path(self.number)
        self.log = EventWriter(self.path, wall=clock, boot=clock, segment_bytes=segment_bytes)

    def start(self, resumed_step: int = 0, total_steps: int = 1000) -> None:
        odd = {"device_name": "a \x1b[31mprocessor", "platform_lines": ("one\x07",)}
        self.say(started(self.number, resumed_step, **odd))
        self.say(events.Phase(phase="train", total_steps=total_steps, steps_per_epoch=100))

    def say(self, event: events.Event) -> None:
        assert self.log.write(event)

    def steps(self, first: int, last: int, every: int = 10, seconds: float = 0.5) -> None:
        for step in range(first, last + 1, every):
            self.clock.now += every * seconds
            self.say(step_event(step, seconds))


def step_event(step: int, seconds: float = 0.5, loss: float | None = -1.0) -> events.Step:
    return events.Step(
        step=step,
        epoch=1 + step // 100,
        loss=5.0 / (1 + step) + 1.0 if loss == -1.0 else loss,
        learning_rate=1e-3,
        gradient_norm=1.0,
        tokens=step * 64,
        tokens_per_second=128.0,
        step_seconds=seconds,
    )


def content(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None


def live(monkeypatch: pytest.MonkeyPatch, state: str = "running") -> None:
    def fake(run: RunDirectory) -> Liveness:
        return Liveness(state, run.newest_attempt(), supervisor_pid=1)  # type: ignore[arg-type]

    monkeypatch.setattr(follow, "liveness", fake)


def test_polls_see_only_what_was_added_and_the_whole_story(
    run: RunDirectory, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    live(monkeypatch)
    follower = Follower(run)
    assert follower.poll().facts.phase == "starting"
    trainer = Trainer(run, clock)
    trainer.start()
    trainer.steps(10, 100)
    first = follower.poll()
    assert (first.facts.step, first.facts.total_steps, first.state) == (100, 1000, "running")
    trainer.steps(110, 200)
    second = follower.poll()
    assert second.train.steps == tuple(range(10, 201, 10))
    assert second.facts.loss == pytest.approx(5.0 / 201 + 1.0)
    assert second.recent_train == second.train


def test_a_run_without_processes_is_not_called_alive(run: RunDirectory, clock: Clock) -> None:
    trainer = Trainer(run, clock)
    trainer.start()
    snapshot = Follower(run).poll()
    assert snapshot.state == "lost"
    assert snapshot.eta_seconds is None
    assert snapshot.verdict is not None


def test_resumed_attempts_are_one_story_and_replace_the_abandoned_steps(
    run: RunDirectory, clock: Clock
) -> None:
    first = Trainer(run, clock)
    first.start()
    first.steps(10, 100)
    first.say(evaluation(100, 3.0))
    first.say(events.Epoch(epoch=1, train_loss=3.0, validation_loss=3.0, minutes=1.0))
    first.say(memory("train", 10, 12, step=100))
    first.steps(110, 200)
    first.say(memory("train", 90, 95, step=200))
    first.say(evaluation(200, 9.0))
    first.say(events.Epoch(epoch=2, train_loss=9.0, validation_loss=9.0, minutes=1.0))
    first.say(events.Error(cause="crashed", message="boom"))
    follower = Follower(run)
    assert follower.poll().facts.error is not None
    second = Trainer(run, clock)
    second.start(resumed_step=100)
    resumed = follower.poll()
    assert resumed.facts.repeats_to == 200
    assert any(
        "resumed from step 100, repeats 100 steps" in line for line in ProgressLines().new(resumed)
    )
    assert resumed.train.steps[-1] == 100
    assert [e.step for e in resumed.evaluations] == [100]
    assert [e.epoch for e in resumed.epochs] == [1]
    assert resumed.validation.steps == (100,)
    assert resumed.facts.error is None
    assert resumed.gauges.allocated == Curve((100,), (12.0,))
    second.steps(110, 150)
    second.say(memory("train", 11, 13, step=150))
    snapshot = follower.poll()
    assert snapshot.gauges.allocated == Curve((100, 150), (12.0, 13.0))
    assert snapshot.gauges.host.steps == (100, 150)
    assert snapshot.attempt == 2
    assert snapshot.train.steps == tuple(range(10, 151, 10))
    assert Follower(run).poll().train == snapshot.train
    third = Trainer(run, clock)
    third.start(resumed_step=140)
    assert follower.poll().facts.repeats_to == 200, "this far the first attempt was"
    fourth = Trainer(run, clock)
    fourth.start(resumed_step=200)
    assert follower.poll().facts.repeats_to == 0


def test_eta_leaves_out_compilation_and_includes_evaluation_samples_and_saving(
    run: RunDirectory, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    live(monkeypatch)
    trainer = Trainer(run, clock)
    trainer.start(total_steps=1000)
    trainer.say(events.Phase(phase="compile"))
    trainer.say(step_event(10, seconds=60.0))
    assert Follower(run).poll().eta_seconds is None
    trainer.steps(20, 110, seconds=0.5)
    assert Follower(run).poll().eta_seconds == pytest.approx(890 * 0.5)
    trainer.say(evaluation(110, 2.0, seconds=20.0))
    assert Follower(run).poll().eta_seconds == pytest.approx(890 * (0.5 + 20.0 / 100))
    trainer.say(events.Sample(step=110, prompt="a", text="b", seconds=10.0))
    assert Follower(run).poll().eta_seconds == pytest.approx(890 * (0.5 + 30.0 / 100))
    trainer.say(events.Checkpoint(step=110, path="step-110", size_bytes=1, seconds=5.0))
    assert Follower(run).poll().eta_seconds == pytest.approx(890 * (0.5 + 35.0 / 100))


def test_minutes_of_training_leave_out_starts_and_pauses(run: RunDirectory, clock: Clock) -> None:
    trainer = Trainer(run, clock)
    trainer.say(events.Phase(phase="data"))
    clock.now += 300.0
    trainer.start()
    trainer.steps(10, 120, seconds=1.0)
    trainer.say(events.Phase(phase="paused"))
    clock.now += 900.0
    trainer.say(events.Phase(phase="train"))
    trainer.steps(130, 180, seconds=1.0)
    died = Follower(run).poll()
    assert died.elapsed_seconds == pytest.approx(180.0 + 300.0 + 900.0)
    assert died.minutes == pytest.approx(180.0 / 60)
    trainer.say(events.Stopped(step=180, reason="asked"))  # as earlier versions wrote it
    assert Follower(run).poll().minutes == report(run).total_minutes == pytest.approx(180.0 / 60)
    again = Trainer(run, clock)
    again.say(events.Phase(phase="data"))
    clock.now += 60.0
    again.start(resumed_step=180)
    again.steps(190, 240, seconds=1.0)
    assert Follower(run).poll().minutes == pytest.approx(240.0 / 60)
    again.say(events.Stopped(step=240, reason="asked", total_minutes=3.5))
    assert Follower(run).poll().minutes == report(run).total_minutes == 3.5


def test_an_attempt_that_takes_no_step_has_no_training_time(
    run: RunDirectory, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    live(monkeypatch, "running")
    trainer = Trainer(run, clock)
    for phase in ("data", "build", "preflight", "wait_disk"):
        trainer.say(events.Phase(phase=phase))
        clock.now += 60.0
        assert Follower(run).poll().minutes == 0.0
    live(monkeypatch, "failed")
    trainer.say(events.Error(cause="disk", message="no room", traceback=""))
    assert Follower(run).poll().minutes == report(run).total_minutes == 0.0
    trainer.say(events.Stopped(step=0, reason="asked", total_minutes=1.0))
    assert Follower(run).poll().minutes == report(run).total_minutes == 0.0
    again = Trainer(run, clock)
    again.start()
    again.steps(10, 120, seconds=1.0)
    assert Follower(run).poll().minutes == pytest.approx(120.0 / 60)
    third = Trainer(run, clock)
    third.say(events.Phase(phase="data"))
    clock.now += 60.0
    third.say(events.Error(cause="data", message="gone", traceback=""))
    assert Follower(run).poll().minutes == report(run).total_minutes == pytest.approx(120.0 / 60)


def test_a_clock_set_back_gives_no_negative_times(
    run: RunDirectory, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    live(monkeypatch, "stopped")
    trainer = Trainer(run, clock)
    trainer.start()
    trainer.steps(10, 50)
    clock.now -= 10_000
    trainer.steps(60, 90, seconds=-3.0)
    snapshot = Follower(run).poll()
    assert snapshot.elapsed_seconds >= 0
    assert seconds_per_step(Follower(run).state) is None
    assert snapshot.facts.step == 90
    live(monkeypatch)
    eta = Follower(run).poll().eta_seconds
    assert eta is None or eta >= 0


def test_a_slow_step_is_counted_by_the_clock_between_two_records(
    run: RunDirectory, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    live(monkeypatch)
    trainer = Trainer(run, clock)
    trainer.start()
    heart = HeartbeatWriter(trainer.path)
    trainer.steps(10, 100, seconds=8.0)
    heart.beat("train", 100, 0, 1.0)
    follower = Follower(run, monotonic=clock)
    first = follower.poll()
    assert (first.steps_done, first.pace_seconds) == (100.0, 8.0)
    assert first.eta_seconds == pytest.approx(900 * 8.0)
    clock.now += 2.0
    second = follower.poll()
    assert second.steps_done == pytest.approx(100.25)
    assert second.eta_seconds == pytest.approx(first.eta_seconds - 2.0)
    heart.beat("train", 101, 0, 1.0)  # ten steps make a record, each one a heartbeat
    clock.now += 6.0
    assert follower.poll().steps_done == 101.0
    clock.now += 80.0
    assert follower.poll().steps_done == pytest.approx(101.95), "never more than one step ahead"
    trainer.say(events.Phase(phase="evaluate"))
    assert follower.poll().steps_done == 101.0
    heart.close()


def test_the_stages_before_the_first_step_have_their_times(
    run: RunDirectory, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    live(monkeypatch)
    monkeypatch.setattr(follow, "boot_seconds", clock)
    trainer = Trainer(run, clock)
    for phase, detail, seconds in (
        ("import", "", 3.0), ("data", "a folder", 1.0), ("build", "from scratch", 2.0), ("build", "", 2.0),
        ("preflight", "training step", 5.0),
    ):  # fmt: skip
        trainer.say(events.Phase(phase=phase, detail=detail))
        clock.now += seconds
    found = Follower(run).poll()
    assert [(s.phase, s.seconds, s.running) for s in found.stages] == [
        ("import", 3.0, False), ("data", 1.0, False), ("build", 4.0, False), ("preflight", 5.0, True),
    ]  # fmt: skip
    assert found.phase_seconds == 5.0
    trainer.say(events.Phase(phase="compile"))
    during = Follower(run).poll()
    trainer.steps(1, 1, every=1, seconds=4.0)
    clock.now += 100.0
    trainer.say(events.Phase(phase="evaluate"))
    trainer.steps(10, 100)
    after = Follower(run).poll().stages
    assert [(s.phase, s.seconds) for s in after[-2:]] == [("preflight", 5.0), ("compile", 4.0)]
    plan = apply_settings(Plan(), ["backend=jax"])
    assert [stage_words(s.phase, s.detail, plan) for s in after[-2:]] == [
        "compiling the training step", "taking the first step",
    ]  # fmt: skip
    assert (
        stage_words(during.facts.phase, during.facts.phase_detail, plan) == "taking the first step"
    )
    assert not any(stage.running for stage in after)


@pytest.mark.parametrize(
    ("backend", "phase", "detail", "words"),
    [("torch", "import", "", "importing PyTorch"), ("jax", "import", "", "importing JAX"),
     ("jax", "preflight", "training step", "compiling the training step"),
     ("torch", "preflight", "training step", "rehearsing a training step"),
     ("torch", "build", "fine-tunes", "building the model to fine-tune"),
     ("jax", "build", "from scratch", "compiling the model, from scratch"),
     ("jax", "compile", "", "compiling the training step"),
     ("jax", "compile", "rehearsed", "taking the first step"),
     ("torch", "data", "hf://a/b", "reading the data: hf://a/b"), ("torch", "evaluate", "", "evaluate")],
)  # fmt: skip
def test_a_stage_is_said_in_words(backend: str, phase: str, detail: str, words: str) -> None:
    assert stage_words(phase, detail, apply_settings(Plan(), [f"backend={backend}"])) == words


def test_a_silent_heartbeat_is_a_stall_only_beyond_what_the_phase_allows(
    run: RunDirectory, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    live(monkeypatch)
    trainer = Trainer(run, clock)
    trainer.start()
    trainer.steps(10, 100, seconds=0.5)
    heart = HeartbeatWriter(trainer.path)
    heart.beat("train", 100, 0, 1.0)
    reader = Clock()
    follower = Follower(run, monotonic=reader)
    assert follower.poll().stalled_seconds is None
    reader.now += 59
    assert follower.poll().stalled_seconds is None
    reader.now += 2
    assert follower.poll().stalled_seconds == pytest.approx(61)
    heart.beat("train", 101, 0, 1.0)
    assert follower.poll().stalled_seconds is None
    heart.beat("compile", 101, 0, 1.0)
    follower.poll()
    reader.now += 1700
    assert follower.poll().stalled_seconds is None
    reader.now += 200
    assert follower.poll().stalled_seconds == pytest.approx(1900)
    live(monkeypatch, "finished")
    assert follower.poll().stalled_seconds is None
    heart.close()


def test_slow_steps_stretch_the_limit_and_the_first_step_may_compile() -> None:
    state = RunState()
    assert stall_limit_seconds(state, "train") == 1800
    for step in range(1, 20):
        reduce(state, step_event(step, seconds=30.0))
    assert stall_limit_seconds(state, "train") == 600


def test_attaching_from_the_saved_state_equals_reading_everything(
    run: RunDirectory, clock: Clock
) -> None:
    trainer = Trainer(run, clock, segment_bytes=4096)
    trainer.start()
    trainer.steps(1, 300, every=1)
    for step in range(1, 301):
        trainer.say(memory("train", 1000 + step, None, step=step))
    supervisor = Follower(run)
    assert supervisor.save_state()
    assert not supervisor.save_state()
    trainer.steps(301, 400, every=1)
    saved = msgspec.json.decode(run.state_path.read_bytes(), type=SavedState)
    assert saved.state.step == 300
    attached = Follower(run)
    assert attached.state.step == 300
    quick = attached.poll()
    run.state_path.unlink()
    assert Follower(run).poll() == quick
    assert quick.facts.step == 400
    assert max(quick.gauges.allocated.values) == 1300


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"version":99}', b"\xff" * 100, b"null", b"{}" * 10]
)
def test_a_damaged_saved_state_is_ignored(run: RunDirectory, clock: Clock, content: bytes) -> None:
    trainer = Trainer(run, clock)
    trainer.start()
    trainer.steps(10, 50)
    run.state_path.write_bytes(content)
    assert Follower(run).poll().facts.step == 50


@pytest.mark.parametrize("old", ["none", "damaged", "of another version", "far behind"])
def test_a_list_reads_the_log_of_a_long_ended_run_once(
    run: RunDirectory, clock: Clock, monkeypatch: pytest.MonkeyPatch, old: str
) -> None:
    monkeypatch.setattr(history, "READ_BYTES", 4096)
    trainer = Trainer(run, clock)
    trainer.start()
    trainer.steps(1, 10, every=1)
    saver = Follower(run)
    saver.save_state()
    trainer.steps(11, 300, every=1)
    if old == "none":
        run.state_path.unlink()
    elif old == "damaged":
        run.state_path.write_bytes(run.state_path.read_bytes()[:-100])
    elif old == "of another version":
        saved = SavedState(version=2, position=(1, 0, 0), damaged=0, state=saver.state)
        write_saved(run.state_path, saved)
    with monkeypatch.context() as patched:
        live(patched)
        before = content(run.state_path)
        status(run)
        assert content(run.state_path) == before, "the supervisor of a live run writes it"
    first = status(run)
    assert (first.state, first.step) == ("lost", 300)
    kept = Follower(run)
    assert kept.state.step == 300, "without reading the log"
    written = run.state_path.stat().st_ino
    assert kept.status() == first
    assert run.state_path.stat().st_ino == written


def test_following_the_output_of_a_live_run_reads_no_event_log(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = run.attempt_path(run.new_attempt()) / "out.log"
    log.write_text("one\n")
    lives = iter([True, True, False])
    there = Liveness("running", 1), Liveness("finished", 1)
    monkeypatch.setattr(logs, "liveness", lambda run: there[not next(lives)])
    monkeypatch.setattr(logs.time, "sleep", lambda seconds: log.open("a").write("more\n"))
    monkeypatch.setattr(follow.EventReader, "read", lambda *ignored: pytest.fail("it was read"))
    with log.open("rb") as source:
        assert (
            "".join(logs.texts(source, lambda: logs.liveness(run).live, raw=False))
            == "one\nmore\nmore\n"
        )


def test_a_saved_state_beyond_the_log_is_ignored(run: RunDirectory, clock: Clock) -> None:
    trainer = Trainer(run, clock)
    trainer.start()
    trainer.steps(10, 500)
    Follower(run).save_state()
    (log,) = trainer.path.glob("events-*.log")
    log.write_bytes(b"".join(log.read_bytes().splitlines(keepends=True)[:7]))
    assert Follower(run).poll().facts.step == 50


def test_damage_costs_one_record_and_is_counted(run: RunDirectory, clock: Clock) -> None:
    trainer = Trainer(run, clock)
    trainer.start()
    trainer.steps(10, 100)
    (log,) = trainer.path.glob("events-*.log")
    lines = log.read_bytes().splitlines(keepends=True)
    lines[5] = lines[5].replace(b'"loss":', b'"losS":')
    log.write_bytes(b"".join(lines))
    snapshot = Follower(run).poll()
    assert snapshot.missing_records == 1
    assert len(snapshot.train.steps) == 9


def test_every_text_is_clean_wherever_it_comes_from(
    run: RunDirectory, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    live(monkeypatch)
    evil = "\x1b]52;c;eA==\x07\x9b2J\u202e\x00"
    run.plan_path.write_text('[model]\nname = "\\u001b]0;x\\u0007y"\n')
    trainer = Trainer(run, clock)
    trainer.start()
    for event in (
        events.Phase(phase=evil, detail=evil),
        events.Warning(message=evil),
        events.Error(cause=evil, message=evil, traceback=evil),
        events.Sample(step=1, prompt=evil, text=f"line\n{evil}"),
        events.Checkpoint(step=1, path=evil, size_bytes=1, seconds=1.0),
        events.Memory(
            phase=evil,
            step=1,
            allocated_bytes=1,
            peak_bytes=2,
            reserved_bytes=None,
            device_bytes=None,
            device_total_bytes=None,
            host_bytes=3,
        ),
        events.Evaluation(
            step=1, loss=1.0, bits_per_byte=None, tokens=1, seconds=1.0, metrics={evil: 1.0}
        ),
        events.Stopped(step=1, reason=evil),
    ):
        trainer.say(event)
    (trainer.path / "out.log").write_text(evil + "\n")
    for text in texts(msgspec.to_builtins(Follower(run).poll())):
        assert not set(text) & {"\x1b", "\x07", "\x9b", "\u202e", "\x00"}, text


def texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from texts(key)
            yield from texts(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from texts(inner)


def memory(phase: str, allocated: int, peak: int | None, step: int = 1) -> events.Memory:
    return events.Memory(
        phase=phase,
        step=step,
        allocated_bytes=allocated,
        peak_bytes=peak,
        reserved_bytes=None,
        device_bytes=allocated + 5,
        device_total_bytes=None,
        host_bytes=7,
        peak_host_bytes=9,
    )


def test_peaks_belong_to_the_phase_in_which_they_were_reached() -> None:
    state = RunState()
    for record in (
        memory("build", 10, 12),
        memory("train", 20, 90),
        memory("evaluate", 15, 40),
        memory("train", 21, 60),
        memory("evaluate", 44, None),
    ):
        reduce(state, record)
    assert state.peaks_by_phase == {"build": 12, "train": 90, "evaluate": 44}
    assert (state.peak_bytes, state.peak_device_bytes, state.peak_host_bytes) == (90, 49, 9)


def test_a_number_the_device_does_not_tell_stays_unknown() -> None:
    state = RunState()
    reduce(state, msgspec.structs.replace(memory("train", 1, None), allocated_bytes=None))
    assert state.peak_bytes is None
    assert state.peaks_by_phase == {}


def evaluation(step: int, loss: float | None, seconds: float = 1.0) -> events.Evaluation:
    return events.Evaluation(step=step, loss=loss, bits_per_byte=None, tokens=10, seconds=seconds)


def test_a_loss_that_is_not_finite_leaves_a_gap_in_the_curve() -> None:
    state = RunState()
    reduce(state, step_event(10))
    reduce(state, step_event(20, loss=None))
    assert state.loss is None
    assert state.train.whole().steps == (10,)


def test_many_evaluations_keep_the_best_one() -> None:
    state = RunState()
    for step in range(1, 1000):
        reduce(state, evaluation(step, 0.5 if step == 7 else 2.0))
    assert len(state.evaluations) <= 128
    assert 7 in [e.step for e in state.evaluations]


numbers = st.integers(-(2**63), 2**64) | st.integers(0, 500) | st.just(10**400)
floats = st.floats(allow_nan=False, allow_infinity=False)  # JSON has no others
records: st.SearchStrategy[events.Record] = st.one_of(
    st.builds(
        events.Step,
        step=numbers,
        epoch=numbers,
        loss=st.none() | floats,
        learning_rate=floats,
        gradient_norm=st.none() | floats,
        tokens=numbers,
        tokens_per_second=floats,
        step_seconds=floats,
        time_boot=floats,
    ),
    st.builds(
        events.Evaluation,
        step=numbers,
        loss=st.none() | floats,
        bits_per_byte=st.none(),
        tokens=numbers,
        seconds=floats,
        metrics=st.dictionaries(st.text(max_size=5), floats, max_size=2),
    ),
    st.builds(
        events.Epoch, epoch=numbers, train_loss=floats, validation_loss=floats, minutes=floats
    ),
    st.builds(
        events.Phase,
        phase=st.sampled_from(["train", "compile", "\x1b"]),
        total_steps=st.none() | numbers,
        steps_per_epoch=st.none() | numbers,
    ),
    st.builds(events.Stopped, step=numbers, reason=st.text(max_size=9)),
    st.builds(
        events.Started,
        attempt=numbers,
        backend=st.just("jax"),
        versions=st.just({}),
        device_id=st.just(""),
        device_name=st.text(max_size=9),
        device_kind=st.just(""),
        memory_label=st.just(""),
        platform_lines=st.just(()),
        resumed_step=numbers,
    ),
)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(records, max_size=40))
def test_no_sequence_of_records_breaks_the_fold(story: list[events.Record]) -> None:
    state = RunState()
    for record in story:
        state = reduce(state, record)
    eta = eta_seconds(state)
    assert eta is None or eta >= 0
    curve = state.train.whole()
    assert list(curve.steps) == sorted(set(curve.steps))
    msgspec.json.decode(msgspec.json.encode(state), type=RunState)


def test_status_needs_no_log_and_names_the_model(
    run: RunDirectory, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    live(monkeypatch)
    trainer = Trainer(run, clock)
    trainer.start()
    trainer.steps(10, 50)
    line = status(run)
    assert (line.id, line.name, line.state) == (run.id, "a test", "running")
    assert (line.step, line.total_steps, line.model) == (50, 1000, "stories")


def test_a_plan_that_cannot_be_read_is_a_warning_not_an_exception(run: RunDirectory) -> None:
    run.plan_path.write_text("model = 3")
    snapshot = Follower(run).poll()
    assert "plan" in snapshot.warnings[0]


def test_the_plan_of_the_run_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    made = create_run(apply_settings(Plan(), ["train.batch_size=3"]), None)
    assert Follower(made).poll().plan.train.batch_size == 3
