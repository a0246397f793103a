"""Runs whose processes are killed, stopped, orphaned and doubled, with real processes."""

from __future__ import annotations

import contextlib
import os
import pty
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from run_story import SUPERVISE, TRAINER, Story

from memconsole.cli.main import cli
from memconsole.cli.runs import train
from memconsole.runs.act import control, launch
from memconsole.runs.act.delete import delete_run
from memconsole.runs.read.follow import Follower
from memconsole.runs.read.life.liveness import liveness, settled
from memconsole.runs.read.state.saved_state import read_saved
from memconsole.runs.record import files
from memconsole.runs.record.directory import RunDirectory, RunError
from memconsole.runs.record.processes import locks
from memconsole.runs.record.records import ExitRecord, FinalRecord, StartRecord
from memconsole.runs.record.states import Verdict

linux = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")


def verdict_of(story: Story) -> Verdict:
    found = liveness(story.run).verdict
    assert found is not None
    return found


def test_a_stop_saves_and_ends_as_resumable(story: Story) -> None:
    story.start()
    story.wait_training()
    request = control.request(story.run, "stop", "me@here")
    given = control.wait_answer(story.run, request)
    assert given is not None
    assert given.accepted
    story.wait(lambda: story.state == "stopped")
    why = verdict_of(story)
    assert (why.reason, why.exit_code, why.resumable) == ("stopped", 75, True)
    assert "me@here" in why.evidence
    assert "trainer output" in (story.run.attempt_path(1) / "out.log").read_text()


def test_a_stopped_run_resumes_as_its_next_attempt(story: Story) -> None:
    story.start()
    story.wait_training()
    control.request(story.run, "stop", "me")
    story.wait(lambda: settled(story.run).state == "stopped")
    story.start()
    story.wait_training()
    assert liveness(story.run).attempt == 2
    with pytest.raises(RunError, match="running"):
        launch.resume(story.run)


def test_an_interrupt_during_a_launch_asks_the_run_to_stop(
    story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    hear = launch._read_message

    def interrupted(reader: int) -> StartRecord | None:
        signal.raise_signal(signal.SIGINT)
        return hear(reader)

    def started(*ignored: object, **named: object) -> RunDirectory:
        story.start()
        return story.run

    monkeypatch.setattr(launch, "_read_message", interrupted)
    monkeypatch.setattr(launch, "resume", lambda *ignored, **changes: started() and 2)
    monkeypatch.setattr(train, "start", started)
    small = ["--set", "model.target_params=100000", "--set", "device.name=cpu"]
    for number, arguments in enumerate(
        (["train", *small], ["resume", story.run.id, "--follow"], ["train", *small, "--detach"]), 1
    ):
        done = CliRunner().invoke(cli, arguments)
        assert story.run.id in done.output, done.output
        assert "stopping" in done.output
        assert done.exit_code == (0 if "--detach" in arguments else 75)
        story.wait(lambda: settled(story.run).state == "stopped")
        assert liveness(story.run).attempt == number
    with pytest.raises(KeyboardInterrupt):
        story.start()
    story.wait(lambda: story.state == "running")
    control.request(story.run, "stop", "me")  # the attempt is not left behind
    story.wait(lambda: settled(story.run).state == "stopped")


@linux
def test_a_killed_trainer_is_dead_at_once_with_the_true_cause(story: Story) -> None:
    chance = random.Random(7)
    for attempt in range(1, 5):
        story.start()
        story.wait(lambda: story.state == "running")
        time.sleep(chance.random() * 0.2)
        os.kill(story.trainer, signal.SIGKILL)
        story.wait(lambda: story.state not in ("running", "starting"))
        story.wait(lambda: story.state == "failed")
        why = verdict_of(story)
        assert (why.reason, why.signal) == ("killed", "SIGKILL")
        assert "outside" in why.evidence
        assert liveness(story.run).attempt == attempt
        story.wait(lambda: locks.holder(story.run.supervisor_lock) is None)


@linux
def test_a_trainer_killed_while_importing_is_told_from_one_that_trained(story: Story) -> None:
    story.start(script="import time\ntime.sleep(600)")
    story.wait(lambda: story.state == "starting")
    record = story.run.attempt_record(1)
    assert record is not None
    assert record.trainer is not None
    os.kill(record.trainer.pid, signal.SIGKILL)
    story.wait(lambda: story.state == "failed")
    assert "before it said anything" in verdict_of(story).evidence


@linux
def test_training_outlives_its_supervisor_and_a_stop_finds_it(story: Story) -> None:
    story.start()
    story.wait_training()
    os.kill(story.supervisor, signal.SIGKILL)
    story.wait(lambda: story.state == "unsupervised")
    step = story.step
    story.wait(lambda: story.step > step)
    control.request(story.run, "stop", "me")
    story.wait(lambda: story.state == "stopped")
    why = verdict_of(story)
    assert why.reason == "stopped"
    assert why.resumable
    assert "its own last record" in why.evidence
    record = files.read_struct(story.run.attempt_path(1) / "exit.json", ExitRecord)
    assert record is not None
    assert record.adopted


@linux
def test_an_adopting_supervisor_says_when_it_cannot_know(story: Story) -> None:
    story.start()
    story.wait_training()
    os.kill(story.supervisor, signal.SIGKILL)
    story.wait(lambda: story.state == "unsupervised")
    launch.adopt(story.run)
    assert story.state == "running"
    launch.adopt(story.run)
    os.kill(story.trainer, signal.SIGKILL)
    story.wait(lambda: story.state == "lost")
    why = verdict_of(story)
    assert (why.reason, why.exit_code) == ("unknown", None)
    assert "exit code unknown" in why.evidence


@linux
def test_dying_together_is_seen_without_any_record(story: Story) -> None:
    story.start()
    story.wait_training()
    supervisor, trainer = story.supervisor, story.trainer
    os.kill(supervisor, signal.SIGKILL)
    os.kill(trainer, signal.SIGKILL)
    story.wait(lambda: story.state == "lost")
    assert not (story.run.attempt_path(1) / "exit.json").exists()
    assert verdict_of(story).reason == "unknown"
    with pytest.raises(RunError, match="not running"):
        control.request(story.run, "stop", "me")


@linux
def test_signals_to_the_supervisor_and_a_hangup_do_not_stop_training(story: Story) -> None:
    story.start()
    story.wait_training()
    for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
        os.kill(story.supervisor, number)
    os.kill(story.trainer, signal.SIGHUP)
    step = story.step
    story.wait(lambda: story.step > step + 5)
    assert story.state == "running"


@linux
def test_closing_the_terminal_and_its_shell_does_not_stop_training(story: Story) -> None:
    trainer = story.folder / "trainer.py"
    story.start(script="raise SystemExit(1)")
    story.wait(lambda: story.state == "failed")
    story.wait(lambda: locks.holder(story.run.supervisor_lock) is None)
    trainer.write_text(TRAINER.replace("EACH_STEP", "pass"))
    launch = (
        "from pathlib import Path; from memconsole.runs.record.directory import RunDirectory;"
        "from memconsole.runs.act import launch; import sys, time;"
        f"launch.start_supervisor(RunDirectory(Path({str(story.run.path)!r})), '--resume',"
        f"[sys.executable, '-P', '-c', {SUPERVISE!r}, {str(trainer)!r}]);"
        "time.sleep(600)"
    )
    shell, screen = pty.fork()
    if shell == 0:
        os.execv(sys.executable, [sys.executable, "-c", launch])
    story.wait_training()
    os.close(screen)
    os.waitpid(shell, 0)
    step = story.step
    story.wait(lambda: story.step > step + 5)
    assert story.state == "running"
    tty = Path(f"/proc/{story.trainer}/stat").read_text().rpartition(")")[2].split()[4]
    assert tty == "0"


def test_a_second_request_hurries_and_the_deadline_kills(story: Story) -> None:
    story.start(each_step="attempt.stop_requested = False")
    story.wait_training()
    first = control.wait_answer(story.run, control.request(story.run, "stop", "me"))
    story.wait(lambda: story.state == "stopping")
    other = control.wait_answer(story.run, control.request(story.run, "stop", "you"))
    assert other is not None
    assert other.note == "already asked by me"
    assert other.deadline_boot == (first.deadline_boot if first else None)
    second = control.wait_answer(story.run, control.request(story.run, "stop", "me"))
    assert first is not None
    assert second is not None
    assert first.deadline_boot is not None
    assert second.deadline_boot is not None
    assert second.deadline_boot < first.deadline_boot
    assert Follower(story.run).poll().stop_requested_by == "me"
    control.request(story.run, "kill", "you")
    story.wait(lambda: story.state == "failed")
    why = verdict_of(story)
    assert why.reason == "killed"
    assert "killed by you" in why.evidence


@linux
def test_orphans_keep_the_run_from_resuming_until_they_are_killed(story: Story) -> None:
    story.start(each_step="step == 3 and os.fork() == 0 and time.sleep(600)")
    story.wait(lambda: story.step > 5)
    os.kill(story.trainer, signal.SIGKILL)
    story.wait(lambda: story.state == "orphaned")
    assert verdict_of(story).reason == "killed"
    advice = f"memconsole stop {story.run.id} --kill ends"
    with pytest.raises(RunError, match=f"children.*{advice}"):
        launch.resume(story.run)
    with pytest.raises(RunError, match=f"orphaned; {advice}"):
        delete_run(story.run)
    assert "not running" in CliRunner().invoke(cli, ["stop", story.run.id, "--yes"]).output
    killed = CliRunner().invoke(cli, ["stop", story.run.id, "--kill", "--yes"])
    assert killed.output.startswith(f"{story.run.id}: killed at step"), killed.output
    assert not locks.gang_held(story.run.gang_lock)


@linux
def test_orphans_are_killed_even_when_their_supervisor_is_gone(story: Story) -> None:
    story.start(each_step="step == 3 and os.fork() == 0 and time.sleep(600)")
    story.wait(lambda: story.step > 5)
    supervisor, trainer = story.supervisor, story.trainer
    os.kill(supervisor, signal.SIGKILL)
    os.kill(trainer, signal.SIGKILL)
    story.wait(lambda: story.state == "orphaned")
    control.request(story.run, "kill", "me")
    story.wait(lambda: not locks.gang_held(story.run.gang_lock))
    story.wait(lambda: liveness(story.run).supervisor_pid is None)


def test_a_second_trainer_is_fenced_and_touches_nothing(story: Story) -> None:
    story.start()
    story.wait_training()
    trainer = [sys.executable, str(story.folder / "trainer.py"), str(story.run.path)]
    same = subprocess.run([*trainer, "1"], capture_output=True, text=True, check=False)
    assert same.returncode == 76
    assert "held by process" in same.stderr
    step = story.step
    story.wait(lambda: story.step > step)
    assert not (story.run.attempt_path(1) / "final.json").exists()
    story.run.new_attempt()
    older = subprocess.run([*trainer, "1"], capture_output=True, text=True, check=False)
    assert older.returncode == 76
    assert "not the newest" in older.stderr


def test_an_older_attempt_learns_that_it_is_fenced_before_it_commits(story: Story) -> None:
    script_step = "attempt.is_newest() or sys.exit(76)"
    story.start(each_step=script_step)
    story.wait_training()
    story.run.new_attempt()
    story.wait(lambda: locks.holder(story.run.trainer_lock) is None)
    story.wait(lambda: (story.run.attempt_path(1) / "exit.json").exists())
    record = files.read_struct(story.run.attempt_path(1) / "exit.json", ExitRecord)
    assert record is not None
    assert record.verdict.reason == "fenced"


@pytest.mark.parametrize(
    ("line", "reason", "says"),
    [
        ("raise MemoryError('no room')", "out_of_memory", "no room"),
        (
            "raise RuntimeError('RESOURCE_EXHAUSTED: Out of memory allocating')",
            "out_of_memory",
            "X",
        ),
        ("raise OSError(28, 'No space left on device')", "disk_full", "No space"),
        ("raise ValueError('\\x1b[31mred')", "crashed", "ValueError"),
        ("os.abort()", "crashed", "SIGABRT"),
        ("os._exit(0)", "crashed", "without saying"),
        ("os._exit(78)", "bad_plan", "78"),
    ],
)
def test_the_cause_of_a_failure_is_named(story: Story, line: str, reason: str, says: str) -> None:
    story.start(each_step=line)
    story.wait(lambda: story.state == "failed")
    why = verdict_of(story)
    assert why.reason == reason
    assert says in why.evidence
    assert "\x1b" not in why.evidence


def test_a_trainer_that_cannot_start_is_a_clear_error(story: Story) -> None:
    with pytest.raises(RunError, match="cannot be started"):
        launch.start_supervisor(
            story.run,
            "--start",
            [
                sys.executable,
                "-c",
                "from memconsole.runs.act.supervise import supervisor as s;"
                "s.main(command=lambda run, n: ['/nonexistent/python'])",
            ],
        )
    assert story.state == "failed"
    with pytest.raises(RunError, match=r"no supervisor could be started: .*broken"):
        launch.start_supervisor(
            story.run, "--resume", [sys.executable, "-c", "raise OSError('broken')"]
        )


def test_two_supervisors_of_one_run_cannot_be(story: Story) -> None:
    story.start()
    story.wait_training()
    with pytest.raises(RunError, match="is running; attach to it, or stop it first"):
        story.start()
    assert story.run.newest_attempt() == 1


def test_a_run_that_is_started_twice_at_once_is_said_to_be_starting(story: Story) -> None:
    script = "import time; time.sleep(60)"
    story.start(script=script)
    with pytest.raises(RunError, match="is starting; attach to it, or stop it first"):
        story.start(script=script)
    assert story.run.newest_attempt() == 1


def test_a_start_waits_for_the_supervisor_of_an_ended_attempt(story: Story) -> None:
    story.start(script="raise SystemExit(1)")
    story.wait(lambda: settled(story.run).state == "failed")
    lock = locks.take(story.run.supervisor_lock)
    threading.Timer(0.3, lock.release).start()
    story.start()
    story.wait_training()


def test_a_finished_run_is_not_resumed(story: Story) -> None:
    story.start(
        each_step="attempt.finish(0, step, 'finished'); attempt.__exit__(None, None, None); os._exit(0)"
    )
    story.wait(lambda: story.state == "finished")
    assert verdict_of(story).resumable is False
    with pytest.raises(RunError, match="finished"):
        launch.resume(story.run)
    final = files.read_struct(story.run.attempt_path(1) / "final.json", FinalRecord)
    assert final is not None
    delete_run(story.run)
    assert not story.run.path.exists()


@linux
def test_the_trainer_inherits_nothing_but_files(story: Story) -> None:
    story.start()
    story.wait_training()
    targets = {}
    for descriptor in Path(f"/proc/{story.trainer}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the trainer has closed it meanwhile
            targets[int(descriptor.name)] = os.readlink(descriptor)
    assert targets[0] == "/dev/null"
    assert targets[1] == targets[2] == str(story.run.attempt_path(1) / "out.log")
    assert not [t for t in targets.values() if t.startswith(("pipe:", "socket:", "/dev/pts"))]
    assert Path(f"/proc/{story.trainer}/oom_score_adj").read_text().strip() == "500"
    environment = Path(f"/proc/{story.trainer}/environ").read_bytes().split(b"\0")
    assert f"MEMCONSOLE_RUN_ID={story.run.id}".encode() in environment
    assert b"MALLOC_ARENA_MAX=2" in environment
    modules = Path(f"/proc/{story.supervisor}/maps").read_text()
    assert not [word for word in ("torch", "jaxlib", "numpy") if f"/{word}/" in modules]


@linux
def test_a_supervisor_holds_less_than_60_mib(story: Story) -> None:
    story.start()
    story.wait_training()
    status = Path(f"/proc/{story.supervisor}/status").read_text()
    assert int(status.split("VmRSS:")[1].split()[0]) < 60 << 10


def test_state_json_lets_a_reader_attach_without_the_log(story: Story) -> None:
    story.start()
    story.wait_training()
    story.wait(lambda: (saved := read_saved(story.run.state_path)) and saved.state.step > 0)
    snapshot = Follower(story.run).poll()
    assert snapshot.facts.step > 0
    assert snapshot.state == "running"
