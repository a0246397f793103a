"""Decides why an attempt ended: a class of cause and one sentence of evidence."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from memconsole.regular_file import open_regular
from memconsole.runs.record import files, requests
from memconsole.runs.record.directory import RunDirectory
from memconsole.runs.record.failures import failed_process
from memconsole.runs.record.failures.failed_process import FailedProcess
from memconsole.runs.record.failures.failure import (
    ExitCode,
    failure_of,
    failure_of_code,
    words_of_memory,
)
from memconsole.runs.record.failures.oom import oom_evidence, oom_kills
from memconsole.runs.record.failures.shortfall import lacked_words, requested_bytes
from memconsole.runs.record.processes import identity
from memconsole.runs.record.processes.heartbeat import Heartbeat, read_heartbeat
from memconsole.runs.record.records import (
    ERROR,
    FINAL,
    OUTPUT,
    ErrorRecord,
    FinalRecord,
    OomCounts,
)
from memconsole.runs.record.states import Verdict
from memconsole.sanitize import clean_line

LAST_OUTPUT_BYTES = 4096
_SIGNAL_WORDS = {
    signal.SIGBUS: "SIGBUS: /dev/shm is full, or a file was cut while it was mapped",
    signal.SIGABRT: "SIGABRT: a library aborted (with several JAX processes: another one died)",
    signal.SIGSEGV: "SIGSEGV: a library crashed; stacks.log shows where",
    signal.SIGILL: "SIGILL: a library was built for another processor",
    signal.SIGXCPU: "SIGXCPU: the limit on processor time was reached",
}


@dataclass(frozen=True)
class Evidence:
    """What is known about the end of an attempt."""

    exit_code: int | None = None
    """None if a signal ended it or no parent waited for it."""
    signal: signal.Signals | None = None
    failed: FailedProcess | None = None
    """Which of several processes a signal ended first, if that was recorded."""
    final: FinalRecord | None = None
    error: ErrorRecord | None = None
    oom_before: OomCounts = OomCounts()
    oom_now: OomCounts = OomCounts()
    rebooted: bool = False
    elsewhere: str | None = None
    """The other machine it was started on. Its processes cannot be seen from here."""
    stopped_by: str | None = None
    killed_by: str | None = None
    kill_note: str = ""
    heartbeat: Heartbeat | None = None
    has_checkpoint: bool = False
    words_of_memory: str = ""
    """The last line of its output that reports a lack of memory."""
    last_line: str = ""
    """The last line of its output that is not empty."""
    silent_supervisor: int | None = None
    """The process id of a supervisor that lives and has recorded nothing."""

    @property
    def where(self) -> str:
        """The trainer's last known step and phase."""
        if self.heartbeat is None:
            return "before it said anything"
        return f"at step {self.heartbeat.step}, phase {self.heartbeat.phase}"

    @property
    def unwatched(self) -> str:
        """Why no supervisor recorded the end."""
        supervisor = self.silent_supervisor
        if supervisor is None:
            return "while nothing watched it"
        suspended = supervisor and identity.is_suspended(supervisor)
        how = "is suspended" if suspended else "has not recorded why"
        return f"and its supervisor (process {supervisor}) {how}"


def verdict(run: RunDirectory, attempt: int, silent_supervisor: int | None = None) -> Verdict:
    """Why an ended attempt ended: the supervisor's verdict, or one derived from its files."""
    recorded = run.exit_record(attempt)
    if recorded is not None:
        return recorded.verdict
    evidence = gather(run, attempt)
    return classify(replace(evidence, silent_supervisor=silent_supervisor))


def gather(
    run: RunDirectory,
    attempt: int,
    exit_code: int | None = None,
    signal_number: signal.Signals | None = None,
) -> Evidence:
    """Collect the evidence from disk and kernel counters, and the exit status if it is known."""
    path = run.attempt_path(attempt)
    record = run.attempt_record(attempt)
    replies = [a for a in requests.replies(run) if a.attempt == attempt and a.accepted]
    stops = [a for a in replies if a.command == "stop"]
    kills = [a for a in replies if a.command == "kill"]
    supervisor = record.supervisor if record else None
    same_boot = supervisor is not None and supervisor.boot_id == identity.boot_id()
    same_host = supervisor is not None and supervisor.host == identity.host_name()
    output = last_output(path / OUTPUT)
    return Evidence(
        exit_code=exit_code,
        signal=signal_number,
        failed=failed_process.kept(path / "processes"),
        final=files.read_struct(path / FINAL, FinalRecord),
        error=files.read_struct(path / ERROR, ErrorRecord),
        oom_before=record.oom_kills if record else OomCounts(),
        oom_now=oom_kills() if same_boot else OomCounts(),
        rebooted=same_host and not same_boot,
        elsewhere=supervisor.host if supervisor and not same_host and not same_boot else None,
        stopped_by=stops[0].who if stops else None,
        killed_by=kills[0].who if kills else None,
        kill_note=kills[0].note if kills else "",
        heartbeat=read_heartbeat(path),
        has_checkpoint=bool(run.committed_checkpoints()),
        words_of_memory=words_of_memory(output),
        last_line=output.strip().rpartition("\n")[2],
    )


def classify(evidence: Evidence) -> Verdict:
    """The verdict that the evidence supports; "unknown" if it supports none."""
    if evidence.signal is not None:
        return _by_signal(evidence, evidence.signal)
    if evidence.exit_code is not None:
        return _by_exit_code(evidence, evidence.exit_code)
    if evidence.failed is not None:
        of_process = _by_signal(evidence, signal.Signals(evidence.failed.signal))
        killed = " was killed" if of_process.reason == "killed" else ""
        words = f"process {evidence.failed.rank}{killed}: {of_process.evidence}"
        return msgspec.structs.replace(of_process, evidence=words)
    if evidence.final is not None:
        code = evidence.final.exit_code
        recorded = _by_exit_code(evidence, code)
        return _verdict(
            evidence,
            recorded.reason,
            f"{recorded.evidence} (from its own last record; its exit code is unknown)",
            exit_code=code,
        )
    if evidence.error is not None:
        return _by_error(evidence, evidence.error, None)
    if evidence.rebooted:
        return _verdict(evidence, "rebooted", f"the machine restarted; last seen {evidence.where}")
    if evidence.killed_by is not None:
        return _verdict(evidence, "killed", _killed_words(evidence))
    if evidence.elsewhere is not None:
        return _verdict(
            evidence,
            "unknown",
            f"it was started on {evidence.elsewhere}; whether it still runs cannot be seen from here; "
            f"last seen {evidence.where}",
        )
    out_of_memory, words = oom_evidence(evidence.oom_before, evidence.oom_now)
    if out_of_memory:
        return _verdict(
            evidence,
            "host_out_of_memory",
            f"it died {evidence.where} without a record and {words} since it started",
        )
    return _verdict(
        evidence,
        "unknown",
        f"it died {evidence.where} {evidence.unwatched}, exit code unknown; {words}",
    )


def _by_signal(evidence: Evidence, number: signal.Signals) -> Verdict:
    if evidence.final is not None and evidence.final.exit_code in set(ExitCode) - {ExitCode.FAILED}:
        # It had done and saved everything; the signal only ended the process.
        return _by_exit_code(evidence, evidence.final.exit_code)
    if evidence.killed_by is not None and number in (signal.SIGKILL, signal.SIGTERM):
        return _verdict(evidence, "killed", _killed_words(evidence), number=number)
    if number == signal.SIGKILL:
        out_of_memory, words = oom_evidence(evidence.oom_before, evidence.oom_now)
        if out_of_memory:
            return _verdict(
                evidence,
                "host_out_of_memory",
                f"SIGKILL {evidence.where} and {words} since the attempt started",
                number=number,
            )
        return _verdict(
            evidence,
            "killed",
            f"SIGKILL {evidence.where} from outside memconsole; {words}",
            number=number,
        )
    if number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if evidence.stopped_by is not None:
            return _verdict(
                evidence,
                "stopped",
                f"asked by {evidence.stopped_by} and ended by {number.name} {evidence.where}, "
                "before it could save",
                number=number,
            )
        return _verdict(
            evidence, "killed", f"{number.name} {evidence.where} from outside", number=number
        )
    if evidence.error is not None:
        return _by_error(evidence, evidence.error, None, number)
    if evidence.words_of_memory and number == signal.SIGABRT:
        return _by_words_of_memory(evidence, number=number)
    words = _SIGNAL_WORDS.get(number, number.name)
    return _verdict(evidence, "crashed", f"{words}; {evidence.where}", number=number)


def _by_exit_code(evidence: Evidence, code: int) -> Verdict:
    final = evidence.final
    if code == ExitCode.DONE and (final is None or final.exit_code != ExitCode.DONE):
        return _verdict(
            evidence,
            "crashed",
            f"it exited with code 0 {evidence.where} without saying that it was done",
            exit_code=code,
        )
    if code == ExitCode.DONE and final is not None:
        return _verdict(evidence, "finished", f"exit code 0 at step {final.step}", exit_code=code)
    if code == ExitCode.STOPPED:
        cause = f"asked by {evidence.stopped_by}" if evidence.stopped_by else "by a signal"
        step = f" at step {final.step}" if final is not None else ""
        name = Path(final.checkpoint).name if final is not None and final.checkpoint else ""
        saved = f", saved as {name}" if name else ""
        words = f"stopped{step}, {cause}{saved}"
        return _verdict(evidence, "stopped", words, exit_code=code)
    failure = failure_of_code(code)
    if failure is not None:
        words = failure.words
        if evidence.error is not None and failure.reason != "fenced":
            words = evidence.error.message.splitlines()[0] if evidence.error.message else words
        return _verdict(evidence, failure.reason, f"{words} (exit code {code})", exit_code=code)
    if evidence.error is not None:
        return _by_error(evidence, evidence.error, code)
    if evidence.words_of_memory:
        return _by_words_of_memory(evidence, exit_code=code)
    # Shells and launchers report a child's signal as 128 + its number.
    if code > 128 and code - 128 in set(signal.Signals):
        return _by_signal(evidence, signal.Signals(code - 128))
    words = f"exit code {code} {evidence.where}; see out.log"
    if evidence.last_line:
        words += f", which ends with: {clean_line(evidence.last_line, 400)}"
    return _verdict(evidence, "crashed", words, exit_code=code)


def _by_words_of_memory(
    evidence: Evidence, exit_code: int | None = None, number: signal.Signals | None = None
) -> Verdict:
    """The verdict if a library could not allocate and ended the process without an exception."""
    words = f"a library asked for more memory than is left {evidence.where}, and aborted: {clean_line(evidence.words_of_memory, 400)}"
    return _verdict(evidence, "out_of_memory", words, exit_code=exit_code, number=number)


def last_output(path: Path) -> str:
    """The end of a trainer's output, as text."""
    try:
        with open_regular(path) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - LAST_OUTPUT_BYTES))
            return file.read(LAST_OUTPUT_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""


def _by_error(
    evidence: Evidence,
    error: ErrorRecord,
    code: int | None,
    number: signal.Signals | None = None,
) -> Verdict:
    reason = failure_of(error.cause).reason
    line = error.message.strip().splitlines()[0] if error.message.strip() else "no message"
    words = f"{error.type} {evidence.where}: {line[:400]}"
    if error.type == "PreflightError":  # its first line says where
        words = line[:400]
    elif reason == "out_of_memory" and requested_bytes(error.message):
        words = f"it {lacked_words(error.message)}, {evidence.where}"
    return _verdict(evidence, reason, words, exit_code=code, number=number)


def _killed_words(evidence: Evidence) -> str:
    note = f": {evidence.kill_note}" if evidence.kill_note else ""
    return f"killed by {evidence.killed_by} {evidence.where}{note}"


def _verdict(
    evidence: Evidence,
    reason: str,
    words: str,
    exit_code: int | None = None,
    number: signal.Signals | None = None,
) -> Verdict:
    saved = evidence.has_checkpoint or bool(evidence.final and evidence.final.checkpoint)
    return Verdict(
        reason=reason,
        evidence=words,
        exit_code=exit_code,
        signal=number.name if number is not None else None,
        resumable=reason == "stopped" or (saved and reason not in ("finished", "bad_plan")),
    )
