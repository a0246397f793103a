"""The exact book: asking a tracer process, outliving its faults, remembering on disk."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from memconsole.memory.exact.timeline import Exact, ExactPhase
from memconsole.memory.tracers.exact_book import ExactBook
from memconsole.memory.tracers.question import neighbours, traced_plan
from memconsole.memory.tracers.store import ExactStore, StoredAnswer, fingerprint
from memconsole.memory.tracers.thread import TimeLimits
from memconsole.plan import plan as plans
from memconsole.plan.machine.budget import Budget
from memconsole.plan.plan import Plan, PlanError
from memconsole.plan.toggles.optimizations import BY_KEY, OPTIMIZATIONS, with_value
from memconsole.user_folders import cache_folder

GIB = 2**30
DEVICE = Budget(
    name="a card", kind="gpu", memory_label="VRAM", total_bytes=24 * GIB, usable_bytes=24 * GIB, why=""
)  # fmt: skip
TRACER = """
import json, os, signal, sys, threading, time

log = open({log!r}, "a", buffering=1)
asked = 0
for line in sys.stdin:
    question = json.loads(line)
    asked += 1
    rows = [l for l in question["plan"].splitlines() if l.startswith("batch_size")]
    rows = int(rows[0].split("=")[1]) if rows else 16
    optimizer = "sgd" if "sgd" in question["plan"] else "adamw"
    log.write(json.dumps(dict(
        question, plan="", rows=rows, optimizer=optimizer, pid=os.getpid(), nice=os.nice(0),
        session=os.getsid(0), inductor=os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    )) + "\\n")
    def say(**answer):
        print(json.dumps(dict(id=question["id"], **answer)), flush=True)
    {behaviour}
"""
ANSWERS = """say(exact=dict(
        phases=dict(backward=dict(total_bytes=rows * 2**20)), reserved_bytes=rows * 2**20 + 5,
        source="test"))"""


class Bench:
    """A book whose tracer is a script, and what the script was asked."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "asked.jsonl"
        self.books: list[ExactBook] = []
        self.news = 0

    def book(self, behaviour: str = ANSWERS, **limits: float) -> ExactBook:
        (self.folder / "scripted_tracer.py").write_text(
            TRACER.format(log=str(self.log), behaviour=behaviour)
        )
        path = os.pathsep.join((str(self.folder), os.environ.get("PYTHONPATH", "")))
        book = ExactBook(
            folder=self.folder / "cache",
            tracers=lambda: {"torch": "scripted_tracer"},
            environment={**os.environ, "PYTHONPATH": path},
            limits=TimeLimits(**{"superseded": 0.2, "starting": 0.0, **limits}),
            on_news=self._count,
        )
        self.books.append(book)
        return book

    def _count(self) -> None:
        self.news += 1

    def asked(self) -> list[dict[str, Any]]:
        if not self.log.exists():
            return []
        return [msgspec.json.decode(line) for line in self.log.read_bytes().splitlines()]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    for book in made.books:
        book.close()


def plan(rows: int = 16, **changes: Any) -> Plan:
    return plans.replace(Plan(), {"train.batch_size": rows, **changes})


def until(what: Callable[[], object], seconds: float = 30.0) -> None:
    """Wait until `what` holds; the limit is for a machine that is stuck, not a measure."""
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "never came true"
        time.sleep(0.01)


def total(book: ExactBook, asked: Plan) -> int | None:
    known = book.lookup(asked, DEVICE)
    return known.exact.phases["backward"].total_bytes if known else None


def test_an_answer_is_looked_up_after_it_came_and_is_told_of(bench: Bench) -> None:
    book = bench.book()
    assert book.lookup(plan(), DEVICE) is None
    book.ask(plan(), DEVICE)
    assert book.progress(plan(), DEVICE).pending
    until(lambda: total(book, plan()) == 16 * 2**20)
    until(lambda: bench.news > 0)
    assert not book.progress(plan(), DEVICE).pending
    known = book.lookup(plan(), DEVICE)
    assert known is not None
    assert known.replayed
    assert total(book, plan(8)) is None


def test_the_tracer_compiles_in_the_cache_of_this_user(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default torch takes a fixed name in the shared temporary folder, which another user may have made."""
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    book = bench.book()
    book.ask(plan(), DEVICE)
    until(bench.asked)
    assert bench.asked()[0]["inductor"] == str(cache_folder() / "inductor")


def test_the_tracer_is_niced_and_leads_a_session_of_its_own(bench: Bench) -> None:
    book = bench.book()
    book.ask(plan(), DEVICE)
    until(bench.asked)
    (asked,) = bench.asked()
    assert asked["nice"] > os.nice(0)
    assert asked["session"] == asked["pid"] != os.getsid(0)
    assert asked["urgent"] is True
    assert asked["kind"] == "gpu"
    assert asked["target"] == plan().device.name


def test_neighbours_are_asked_afterwards_without_urgency(bench: Bench) -> None:
    book = bench.book()
    around = [plan(1), plan(2), plan(4)]
    book.ask(plan(), DEVICE, around)
    until(lambda: all(book.lookup(p, DEVICE) for p in around))
    asked = bench.asked()
    assert [a["rows"] for a in asked] == [16, 1, 2, 4]
    assert [a["urgent"] for a in asked] == [True, False, False, False]
    assert len({a["pid"] for a in asked}) == 1, "one process answers all"


def test_what_differs_in_nothing_the_step_sees_is_not_asked_again(bench: Bench) -> None:
    book = bench.book()
    book.ask(plan(), DEVICE)
    until(lambda: book.lookup(plan(), DEVICE))
    other = plans.replace(plan(), {"train.learning_rate": 0.5, "data.shuffle_buffer": 77})
    assert book.lookup(other, DEVICE) is not None
    assert book.lookup(plans.replace(plan(), {"optimize.precision": "bf16"}), DEVICE) is None


def test_a_tracer_that_dies_is_asked_once_more_and_then_its_last_words_are_the_reason(
    bench: Bench,
) -> None:
    book = bench.book('print("no such kernel", file=sys.stderr); sys.exit(3)')
    book.ask(plan(), DEVICE)
    until(lambda: book.progress(plan(), DEVICE).problem)
    problem = book.progress(plan(), DEVICE).problem
    assert "exit status 3" in problem
    assert "no such kernel" in problem
    assert "\n" not in problem
    assert len(bench.asked()) == 2
    assert len({a["pid"] for a in bench.asked()}) == 2
    book.ask(plan(), DEVICE)
    time.sleep(0.2)
    assert len(bench.asked()) == 2, "it is not asked over and over"
    book.forget_problems()
    book.ask(plan(), DEVICE)
    until(lambda: len(bench.asked()) == 4)


def test_a_tracer_that_is_killed_once_is_replaced_and_answers(bench: Bench) -> None:
    marker = bench.folder / "died"
    book = bench.book(
        f"if not os.path.exists({str(marker)!r}):\n"
        f"        open({str(marker)!r}, 'w').close(); os.kill(os.getpid(), signal.SIGKILL)\n"
        f"    {ANSWERS}"
    )
    book.ask(plan(), DEVICE)
    until(lambda: total(book, plan()) == 16 * 2**20)
    assert book.progress(plan(), DEVICE).problem == ""


def test_an_aborted_tracer_is_named_by_its_signal(bench: Bench) -> None:
    book = bench.book("os.kill(os.getpid(), signal.SIGABRT)")
    book.ask(plan(), DEVICE)
    until(lambda: book.progress(plan(), DEVICE).problem)
    assert "SIGABRT" in book.progress(plan(), DEVICE).problem


@pytest.mark.parametrize(
    "garbage", ["print('not json', flush=True)", 'print(\'{"id": "x"}\', flush=True)']
)
def test_what_is_no_answer_is_a_reason_and_no_exception(bench: Bench, garbage: str) -> None:
    book = bench.book(f"{garbage}; time.sleep(60)")
    book.ask(plan(), DEVICE)
    until(lambda: book.progress(plan(), DEVICE).problem)
    assert "invalid answer" in book.progress(plan(), DEVICE).problem


def test_the_tracers_own_reason_is_passed_on(bench: Bench) -> None:
    book = bench.book('say(problem="pip install the plugin")')
    book.ask(plan(), DEVICE)
    until(lambda: book.progress(plan(), DEVICE).problem == "pip install the plugin")
    assert len(bench.asked()) == 1


def test_a_backend_without_a_tracer_says_so(bench: Bench) -> None:
    book = bench.book()
    jax = plans.replace(plan(), {"backend": "jax"})
    book.ask(jax, DEVICE)
    until(lambda: book.progress(jax, DEVICE).problem)
    assert "jax" in book.progress(jax, DEVICE).problem


def test_a_tracer_that_cannot_be_interrupted_is_killed_with_what_it_started(bench: Bench) -> None:
    book = bench.book(
        "if rows == 16:\n"
        "        import subprocess\n"
        "        child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "        log.write(json.dumps(dict(child=child.pid)) + '\\n')\n"
        "        time.sleep(600)\n"
        f"    {ANSWERS}"
    )
    book.ask(plan(16), DEVICE)
    until(lambda: len(bench.asked()) == 2)
    first, child = bench.asked()
    book.ask(plan(8), DEVICE)
    until(lambda: total(book, plan(8)) == 8 * 2**20)
    until(lambda: not psutil.pid_exists(first["pid"]))
    until(lambda: not _alive(child["child"]))
    assert total(book, plan(16)) is None
    assert book.progress(plan(16), DEVICE).problem == "", "it may be asked again"


def test_a_quick_change_of_mind_costs_no_process(bench: Bench) -> None:
    book = bench.book(f"time.sleep(0.05)\n    {ANSWERS}", superseded=5.0)
    for rows in (16, 8, 4, 2):
        book.ask(plan(rows), DEVICE)
        time.sleep(0.03)
    until(lambda: total(book, plan(2)) == 2 * 2**20)
    assert len({a["pid"] for a in bench.asked()}) == 1


def test_a_neighbour_in_work_goes_on_when_its_key_is_pressed(bench: Bench) -> None:
    gate = bench.folder / "go"
    book = bench.book(
        "if rows == 8:\n"
        f"        while not os.path.exists({str(gate)!r}): time.sleep(0.01)\n"
        f"    {ANSWERS}"
    )
    book.ask(plan(16), DEVICE, [plan(8)])
    until(lambda: [a["rows"] for a in bench.asked()] == [16, 8])
    book.ask(plan(8), DEVICE)
    time.sleep(0.5)
    gate.touch()
    until(lambda: total(book, plan(8)) == 8 * 2**20)
    assert [a["rows"] for a in bench.asked()] == [16, 8], "asked once, by one process"


def test_a_question_without_end_is_given_up(bench: Bench) -> None:
    book = bench.book("time.sleep(600)", longest=1.0)
    book.ask(plan(), DEVICE)
    until(lambda: "no answer" in book.progress(plan(), DEVICE).problem)
    # A busy machine may give up before the tracer has noted its process.
    until(lambda: not any(psutil.pid_exists(asked["pid"]) for asked in bench.asked()))


def test_an_idle_tracer_is_closed_and_started_again_when_needed(bench: Bench) -> None:
    book = bench.book(idle=0.2)
    book.ask(plan(16), DEVICE)
    until(lambda: book.lookup(plan(16), DEVICE))
    until(lambda: not psutil.pid_exists(bench.asked()[0]["pid"]))
    book.ask(plan(8), DEVICE)
    until(lambda: book.lookup(plan(8), DEVICE))


def test_rest_ends_the_tracer_and_what_it_was_asked(bench: Bench) -> None:
    book = bench.book("time.sleep(600)")
    book.ask(plan(), DEVICE)
    until(bench.asked)
    book.rest()
    until(lambda: not psutil.pid_exists(bench.asked()[0]["pid"]))
    assert not book.progress(plan(), DEVICE).pending
    assert book.progress(plan(), DEVICE).problem == ""


def test_without_tracing_only_the_store_is_read(bench: Bench) -> None:
    first = bench.book()
    first.ask(plan(), DEVICE)
    until(lambda: first.lookup(plan(), DEVICE))
    first.close()
    second = bench.book()
    second.ask(plan(), DEVICE, [plan(8)], trace=False)
    until(lambda: total(second, plan()) == 16 * 2**20)
    assert len(bench.asked()) == 1
    assert total(second, plan(8)) is None


def test_closing_kills_the_tracer_and_leaves_no_thread(bench: Bench) -> None:
    book = bench.book("time.sleep(600)")
    book.ask(plan(), DEVICE)
    until(bench.asked)
    book.close()
    assert not psutil.pid_exists(bench.asked()[0]["pid"])
    book.close()


def test_the_tracer_ends_with_a_console_that_is_killed(bench: Bench) -> None:
    """Its standard input closes: no orphan goes on tracing."""
    bench.book("pass").close()
    script = (
        "import os, sys, time\n"
        "from memconsole.memory.tracers.exact_book import ExactBook\n"
        "from memconsole.memory.table import Budget\n"
        "from memconsole.plan.plan import Plan\n"
        "book = ExactBook(folder=None, tracers=lambda: {'torch': 'scripted_tracer'})\n"
        "d = Budget(name='x', kind='gpu', memory_label='', total_bytes=1, usable_bytes=1, why='')\n"
        "book.ask(Plan(), d)\n"
        "time.sleep(600)\n"
    )
    environment = {
        **os.environ, "PYTHONPATH": str(bench.folder), "XDG_CACHE_HOME": str(bench.folder / "xdg"),
    }  # fmt: skip
    console = psutil.Popen([sys.executable, "-c", script], env=environment)
    until(bench.asked)
    console.send_signal(signal.SIGKILL)
    console.wait()
    until(lambda: not _alive(bench.asked()[0]["pid"]))


def _alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


# The store


def stored(key: str, size: int = 1) -> StoredAnswer:
    exact = Exact(phases={"forward": ExactPhase(total_bytes=size)}, source="s" * 2000)
    return StoredAnswer(key=key, exact=exact)


def test_what_is_written_is_read_and_nothing_else(tmp_path: Path) -> None:
    store = ExactStore(tmp_path, "f")
    store.write(stored("a", 7))
    assert store.read("a") == stored("a", 7)
    assert store.read("b") is None
    assert ExactStore(tmp_path, "g").read("a") is None, "other code, other answers"
    store.write(stored("a", 8))
    assert store.read("a") == stored("a", 8)
    assert len(list(tmp_path.rglob("*.*"))) == 1


@pytest.mark.parametrize("damage", [b"", b"{", b"\xff\xfe", b'{"key": "other"}', b"[" * 100_000])
def test_a_damaged_entry_is_no_entry(tmp_path: Path, damage: bytes) -> None:
    store = ExactStore(tmp_path, "f")
    store.write(stored("a"))
    (path,) = tmp_path.rglob("*.json")
    path.write_bytes(damage)
    assert store.read("a") is None
    store.write(stored("a"))
    assert store.read("a") == stored("a")


def test_the_store_stays_within_its_bounds_and_keeps_what_was_used_last(tmp_path: Path) -> None:
    store = ExactStore(tmp_path, "f", most_bytes=40_000)
    for n in range(30):
        store.write(stored(f"k{n}"))
        path = max(tmp_path.rglob("*.json"), key=lambda p: p.stat().st_mtime_ns)
        os.utime(path, (n, n))
    store.sweep()
    assert sum(p.stat().st_size for p in tmp_path.rglob("*.json")) <= 40_000
    assert store.read("k29") is not None
    assert store.read("k0") is None


def test_a_store_that_cannot_be_written_is_silent(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    store = ExactStore(blocked, "f")
    store.write(stored("a"))
    assert store.read("a") is None


def test_the_fingerprint_follows_code_and_imports_nothing() -> None:
    assert fingerprint("memconsole_torch.tracing.trace") != fingerprint(
        "memconsole_jax.tracing.trace"
    )
    assert fingerprint("memconsole_torch.tracing.trace") == fingerprint(
        "memconsole_torch.tracing.trace"
    )
    code = (
        "import sys; from memconsole.memory.tracers.store import fingerprint\n"
        "fingerprint('memconsole_torch.tracing.trace'); fingerprint('memconsole_jax.tracing.trace')\n"
        "assert not {'torch', 'jax', 'numpy', 'memconsole_torch', 'memconsole_trainer'} & set(sys.modules)"
    )
    assert psutil.Popen([sys.executable, "-c", code]).wait() == 0


def test_changed_code_is_another_fingerprint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "some_backend"
    package.mkdir()
    (package / "__init__.py").write_text("a = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = fingerprint("some_backend.trace")
    (package / "__init__.py").write_text("a = 2\n")
    assert fingerprint("some_backend.trace") != before


# What is asked


def test_keys_tell_apart_what_needs_another_answer() -> None:
    base = traced_plan(plan(), DEVICE)
    card = msgspec.structs.replace(DEVICE, name="another card")
    assert traced_plan(plan(), card).key != base.key
    for changes in (
        {"train.batch_size": 8}, {"data.sequence_length": 64}, {"optimize.precision": "bf16"},
        {"optimize.accumulation_steps": 4}, {"train.grad_clip": 0.0}, {"backend": "jax"},
        {"model.target_params": 2_000_000}, {"optimize.lora_rank": 8},
    ):  # fmt: skip
        assert traced_plan(plans.replace(plan(), changes), DEVICE).key != base.key, changes
    for changes in ({"train.seed": 1}, {"train.max_steps": 3}, {"data.max_examples": 5}):
        assert traced_plan(plans.replace(plan(), changes), DEVICE).key == base.key, changes


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_every_value_of_every_optimization_is_another_structure(backend: str) -> None:
    """Except: compile (traced without it), sharding, heap, and accumulation (all counts above one share a trace)."""
    for row in OPTIMIZATIONS:
        if not row.key.startswith("optimize.") or row.key.endswith(
            (".compile", ".sharding", ".heap")
        ):
            continue
        base = plan(backend=backend)
        values = row.values(base)[:2] if row.key.endswith("_steps") else row.values(base)
        found = {traced_plan(row.apply(base, v), DEVICE).structure for v in values}
        assert len(found) == len(values), row.key


def test_neighbours_are_the_next_key_presses_the_selected_row_first() -> None:
    found = list(neighbours(Plan(), "optimize.optimizer"))
    row = BY_KEY["optimize.optimizer"]
    assert found[0] == row.apply(Plan(), row.next_value(Plan()))
    assert Plan() not in found
    assert len(set(found)) == len(found)
    for other in OPTIMIZATIONS:
        value = other.next_value(Plan())
        try:
            pressed = with_value(other, Plan(), value)
        except PlanError:
            continue  # the key does nothing but say why
        assert (pressed in found) == (other.refusal(Plan(), value) is None)
    for value in row.values(Plan()):
        assert value == row.value(Plan()) or row.apply(Plan(), value) in found
