"""Progress lines say each thing once; the summary says how the run stands."""

from types import SimpleNamespace

import msgspec
import pytest
from click.testing import CliRunner

from memconsole.cli.runs import stop
from memconsole.cli.runs.memory_report import memory_lines
from memconsole.cli.runs.progress import ProgressLines, step_line, summary
from memconsole.cli.runs.train import exit_code
from memconsole.plan.plan import Plan, replace
from memconsole.runs.read.report.comparison import MeasuredLine, MemoryLine
from memconsole.runs.read.report.report import MemoryReport
from memconsole.runs.read.shown.snapshot import RunSnapshot
from memconsole.runs.read.shown.status import RunStatus
from memconsole.runs.read.state.facts import RunFacts
from memconsole.runs.read.state.ranks import RankFacts
from memconsole.runs.record.failures.shortfall import Shortfall
from memconsole.runs.record.log.events import Ended, Epoch, Evaluation, RankReading, Step
from memconsole.runs.record.states import Verdict
from memconsole_trainer.loop import summary as log

RUN = RunSnapshot(
    id="20260101-000000-abcdef", name="a run", state="running", plan=Plan(), attempt=1, created_wall=0.0
)  # fmt: skip


def evaluation(step: int) -> Evaluation:
    metrics = {"unigram_loss": 6.5}
    return Evaluation(
        step=step, loss=5.0, bits_per_byte=2.0, tokens=10, seconds=1.0, metrics=metrics
    )


def changed(**fields: object) -> RunSnapshot:
    told = {name: fields.pop(name) for name in RunFacts.__struct_fields__ if name in fields}
    return msgspec.structs.replace(RUN, facts=RunFacts(**told), **fields)  # type: ignore[arg-type]


def test_each_evaluation_and_epoch_is_told_once_though_the_lists_are_capped() -> None:
    lines = ProgressLines()
    told = []
    for last in range(1, 300):
        window = tuple(evaluation(step) for step in range(max(1, last - 127), last + 1))
        epochs = tuple(
            Epoch(epoch=n, train_loss=4.0, validation_loss=5.0, minutes=1.0)
            for n in range(max(1, last - 9), last + 1)
        )
        told += list(lines.new(changed(evaluations=window, epochs=epochs)))
    assert sum("validation loss 5.0000  2.0000 bits/byte" in line for line in told) == 299
    assert sum(line.startswith("epoch ") for line in told) == 299


def test_steps_without_a_learned_token_are_told_as_such() -> None:
    epoch = Epoch(epoch=1, train_loss=None, validation_loss=None, minutes=1.0)
    told = list(ProgressLines().new(changed(epochs=(epoch,))))
    assert "epoch 1  train loss nothing learned  1.00 min" in told
    ended = Ended(
        step=3,
        best_validation_loss=None,
        final_validation_loss=None,
        final_train_loss=None,
        total_minutes=1.0,
        average_epoch_minutes=None,
        epochs=0,
    )
    told = " ".join(summary(changed(loss=1.0, ended=ended)).split())
    assert "Final training loss: nothing learned" in told
    step = Step(
        step=3,
        epoch=1,
        loss=None,
        learning_rate=1e-3,
        gradient_norm=0.0,
        tokens=9,
        tokens_per_second=9.0,
        step_seconds=1.0,
    )
    assert "  loss n/a (nothing learned)  " in log.step_line(step, 9, "tokens")
    assert "  loss not finite  " in log.step_line(step, 9, "tokens", finite=False)
    assert "Train Loss:     n/a (nothing learned) " in log.epoch_block(epoch, 1, 1.0)


def test_the_loss_of_training_rows_is_told_beside_the_validation_loss() -> None:
    measured = msgspec.structs.replace(evaluation(7), train_loss=4.25)
    told = "step 7  validation loss 5.0000  4.2500 on training rows  2.0000 bits/byte"
    assert any(
        line.startswith(told) for line in ProgressLines().new(changed(evaluations=(measured,)))
    )
    assert "Final loss on some training rows: 4.2500" in " ".join(
        summary(changed(evaluations=(measured,))).split()
    )


def test_a_warning_is_told_once() -> None:
    lines = ProgressLines()
    assert "warning: a" in list(lines.new(changed(warnings=("a",))))
    assert list(lines.new(changed(warnings=("a", "b")))) == ["warning: b"]


def test_the_summary_of_a_live_run_claims_no_end() -> None:
    text = summary(RUN)
    assert "TRAINING RUNNING" in text
    assert "unknown" not in text


@pytest.mark.parametrize(
    ("reason", "more"), [("nan", " --set train.learning_rate=…"), ("crashed", "")]
)
def test_a_run_whose_loss_was_not_finite_is_resumed_with_another_rate(
    reason: str, more: str
) -> None:
    verdict = Verdict(reason=reason, evidence="it ended", resumable=True)
    text = summary(changed(state="failed", verdict=verdict))
    assert text.endswith(f"resume with: memconsole resume {RUN.id}{more}")


def test_the_summary_of_a_finished_run_has_its_figures() -> None:
    ended = Ended(
        step=10, best_validation_loss=5.0, final_validation_loss=5.0, final_train_loss=4.5,
        total_minutes=2.0, average_epoch_minutes=1.0, epochs=2,
    )  # fmt: skip
    text = summary(
        changed(state="finished", ended=ended, evaluations=(evaluation(10),), loss=4.5, step=10)
    )
    assert "TRAINING COMPLETE" in text
    for figure in ("5.0000", "4.5000", "6.5000", "2.00 minutes"):
        assert figure in text
    assert "Best validation loss: 5.0000 nats at step 10" in " ".join(text.split())
    assert "Best evaluation" not in text
    judged = msgspec.structs.replace(evaluation(10), metrics={"cost_ratio": 1.25})
    plan = replace(Plan(), {"model.name": "lqr", "data.source": "x.h5"})
    text = " ".join(summary(changed(plan=plan, evaluations=(judged,))).split())
    assert "Best evaluation: 1.2500 x optimal cost on unseen systems at step 10, " in text


@pytest.mark.parametrize(
    ("held", "asked", "words"),
    [
        (None, None, "while training: needed at least 9.00 MiB"),
        (4, 5, "while training: held 4.00 MiB, asked for 5.00 MiB; needed at least 9.00 MiB"),
    ],
)
def test_what_a_run_lacked_leaves_out_what_is_not_known(
    held: int | None, asked: int | None, words: str
) -> None:
    lacked = Shortfall(
        phase="train",
        held_bytes=held and held << 20,
        requested_bytes=asked and asked << 20,
        needed_bytes=9 << 20,
    )
    memory = MemoryReport(
        estimated=MemoryLine(), measured=MeasuredLine(), by_phase={}, shortfall=lacked
    )
    assert memory_lines(memory)[-1] == f"ran out of memory {words}"


def test_the_summary_counts_epochs_that_are_not_kept() -> None:
    kept = tuple(
        Epoch(epoch=n, train_loss=4.0, validation_loss=None, minutes=2.0) for n in range(45, 301)
    )
    ended = Ended(
        step=10, best_validation_loss=None, final_validation_loss=None, final_train_loss=4.5,
        total_minutes=900.0, average_epoch_minutes=3.0, epochs=300,
    )  # fmt: skip
    finished = " ".join(summary(changed(state="finished", ended=ended, epochs=kept)).split())
    assert "Average epoch time: 3.00 minutes Total epochs: 300" in finished
    stopped = " ".join(summary(changed(state="stopped", epochs=kept)).split())
    assert "Average epoch time: 2.00 minutes Total epochs: 300" in stopped


def test_an_epoch_without_held_out_data_tells_no_validation_loss() -> None:
    epoch = Epoch(epoch=1, train_loss=4.0, validation_loss=None, minutes=1.0)
    assert "epoch 1  train loss 4.0000  1.00 min" in ProgressLines().new(changed(epochs=(epoch,)))


def test_exit_codes_say_how_a_run_ended() -> None:
    def ended(state: str, reason: str) -> RunSnapshot:
        return changed(state=state, verdict=Verdict(reason=reason, evidence=""))

    assert exit_code(ended("finished", "finished")) == 0
    assert exit_code(ended("failed", "crashed")) == 1
    assert exit_code(ended("failed", "bad_plan")) == 2
    assert exit_code(ended("stopped", "stopped")) == 75


def test_the_lines_of_a_run_on_several_devices_tell_each_share_and_name_a_slow_rank() -> None:
    def ranks(*exchanged: float) -> tuple[RankFacts, ...]:
        return tuple(
            RankFacts(
                reading=RankReading(
                    rank=n,
                    step=3,
                    allocated_bytes=(n + 1) << 30,
                    step_seconds=1.0,
                    exchange_seconds=s,
                )
            )
            for n, s in enumerate(exchanged)
        )

    plan = replace(Plan(), {"device.count": 2, "optimize.sharding": "fsdp"})
    run = changed(
        plan=plan, step=3, loss=1.0, tokens_per_second=500.0, rank_count=2, ranks=ranks(0.4, 0.1)
    )
    line = step_line(run)
    assert "500 tokens/s (250 each device)" in line
    assert "memory at most 2.00 GiB" in line
    assert "rank 1 is slow: the others wait 30 % of a step for it" in line
    assert "rank 1 is slow" in summary(run)
    hardly = changed(plan=plan, step=3, loss=1.0, rank_count=2, ranks=ranks(0.4, 0.35))
    assert "slow" not in step_line(hardly) + summary(hardly)
    assert "each" not in step_line(changed(step=3, loss=1.0, tokens_per_second=500.0))


@pytest.mark.parametrize("resumable", [False, True])
def test_a_stop_names_the_command_that_resumes_if_there_is_something_to_resume(
    resumable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = RunStatus(
        id="one", name="", state="running", phase="train", step=3, total_steps=9, loss=None, backend="torch",
        model="gpt2", created_wall=0.0,
    )  # fmt: skip
    killed = msgspec.structs.replace(live, state="failed", ended_by="killed", resumable=resumable)
    seen = iter((live, killed))
    monkeypatch.setattr(stop, "find_live", lambda word: SimpleNamespace(id="one"))
    monkeypatch.setattr(stop, "Follower", lambda run: SimpleNamespace(status=lambda: next(seen)))
    monkeypatch.setattr(stop, "request", lambda run, order, who: "")
    output = CliRunner().invoke(stop.command, ["one", "--kill", "--yes"]).output
    assert "one: killed at step 3" in output
    assert ("memconsole resume one" in output) == resumable
