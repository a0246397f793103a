"""The table of a hybrid plan: what each phase holds, counted by hand from the number of trained weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from memconsole.memory.activations.jax_packing import forward_library_bytes, library_bytes
from memconsole.memory.answers.advice import remedies
from memconsole.memory.answers.places import placed, places
from memconsole.memory.coefficients import runtime
from memconsole.memory.estimate import estimate, model_of, table_of
from memconsole.memory.hybrid import PEAK_FACTORS, plain
from memconsole.memory.state.predicting import moments
from memconsole.memory.state.sizes import sizes
from memconsole.memory.state.step_sizes import step_of
from memconsole.memory.table import SNAPSHOTS, MemoryTable, Tier
from memconsole.plan.check import check
from memconsole.plan.machine.budget import Budget
from memconsole.plan.plan import Plan, PlanError, replace
from memconsole.plan.toggles.optimizations import BY_KEY
from tests.unit.memory.cards import card

ROOT = Path(__file__).parents[3]

GPT2 = replace(Plan(), {"model.name": "gpt2"})
N = sizes(model_of(GPT2)).used.elements
MATRICES = N - sizes(model_of(GPT2)).small
TRAINED = ("warmup", "full", "correct")


def device(kind: str) -> Budget:
    return Budget(
        name=kind, kind=kind, memory_label="memory", total_bytes=1 << 40, usable_bytes=1 << 40, why="test",
        bandwidth_bytes_per_second=1e12, peak_flops={"fp32": 2e13, "bf16": 1e14},
    )  # fmt: skip


ROWS = {"train__batch_size": 32, "data__sequence_length": 1024}
"""So many that a jump's forward pass takes more than the products of its snapshots."""


def hybrid(**settings: Any) -> Plan:
    named = {key.replace("__", "."): value for key, value in settings.items()}
    return replace(GPT2, {"hybrid.mode": "balanced", **named})


def at(table: MemoryTable, component: str, phase: str) -> int:
    return next(c.at(phase) for c in table.components if c.name == component)


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_a_trained_phase_holds_what_a_plain_step_holds(backend: str, kind: str) -> None:
    plan, budget = hybrid(backend=backend), device(kind)
    table, step = table_of(plan, budget), table_of(plain(plan), budget)
    highest = max(step.phases[p] for p in step.step_phases)
    for phase in TRAINED:
        own = table.phases[phase] - at(table, SNAPSHOTS, phase)
        if phase != "correct" and (backend, kind) == ("torch", "cpu"):  # the heap keeps less
            assert 0.9 * highest < own < highest
        else:
            assert own == highest
        assert (at(table, SNAPSHOTS, phase) > 0) == (kind == "cpu" and phase != "warmup")
    for phase in table.phases:
        assert sum(at(table, c.name, phase) for c in table.components) == table.phases[phase]


def test_a_cpu_holds_six_snapshots_with_their_anchor_and_the_weights_before_a_jump() -> None:
    table = table_of(hybrid(), device("cpu"))
    assert at(table, SNAPSHOTS, "full") == 7 * 2 * N
    assert at(table, SNAPSHOTS, "correct") == 7 * 2 * N + 4 * N
    assert at(table, SNAPSHOTS, "predict") == 7 * 2 * N + 4 * N + 2 * N  # and the path
    shorter = hybrid(hybrid__full_steps=6)  # three snapshots in a full phase, at a stride of three
    assert at(table_of(shorter, device("cpu")), SNAPSHOTS, "full") == 4 * 2 * N


def test_a_gpu_keeps_the_path_on_the_device_and_the_rest_on_the_host() -> None:
    plan, budget = hybrid(hybrid__memory="pinned", **ROWS), device("gpu")
    table = table_of(plan, budget)
    assert at(table, SNAPSHOTS, "predict") == 2 * N
    assert at(table, SNAPSHOTS, "full") == 0
    more = table.host_bytes - table_of(plain(plan), budget).host_bytes
    # six snapshots and an anchor, the weights before a jump, the weights while copies are tried, the state
    assert more == 7 * 2 * N + 4 * N + 4 * MATRICES + 8 * N


@pytest.mark.parametrize(
    ("memory", "kind", "left"),
    [
        ("none", "gpu", 8 * N),
        ("cpu", "gpu", 0),
        ("pinned", "gpu", 0),
        ("reinitialize", "gpu", 0),
        ("cpu", "cpu", 8 * N),
        ("pinned", "cpu", 8 * N),
        ("reinitialize", "cpu", 0),
    ],
)
def test_the_optimizer_state_is_where_its_strategy_puts_it(
    memory: str, kind: str, left: int
) -> None:
    table = table_of(hybrid(hybrid__memory=memory), device(kind))
    assert at(table, "optimizer state", "predict") == left
    assert at(table, "optimizer state", "full") == 8 * N
    assert at(table, "gradients", "predict") == 0
    assert ("restore" in table.phases) == (memory != "none")
    if memory != "none":
        assert at(table, "optimizer state", "restore") == 8 * N


def test_a_compressed_state_takes_a_byte_per_number_and_four_per_block() -> None:
    table = table_of(hybrid(hybrid__memory="compress"), device("cpu"))
    codes = 2 * N + 4 * -(-2 * N // 256)
    assert at(table, "optimizer state", "predict") == codes
    assert at(table, "optimizer state", "restore") == 8 * N + codes
    jax = table_of(hybrid(backend="jax", hybrid__memory="compress"), device("cpu"))
    assert at(jax, "optimizer state", "predict") == codes
    assert at(jax, "optimizer state", "restore") == 8 * N  # codes are freed as they are decoded


def test_the_first_jump_of_a_predict_phase_has_no_weights_to_return_to() -> None:
    """With two jumps in a phase, the second one runs while the state comes back."""
    cpu = device("cpu")
    kept, away = hybrid(), hybrid(hybrid__memory="reinitialize")
    tables = [table_of(plan, cpu) for plan in (kept, away)]
    held = [at(table, SNAPSHOTS, "predict") for table in tables]
    assert held[0] - held[1] == 4 * N
    assert at(tables[1], SNAPSHOTS, "restore") == held[0]


def test_the_heap_keeps_at_most_what_the_forward_passes_of_a_jump_free() -> None:
    cpu = device("cpu")
    own = {"hybrid__memory": "reinitialize", **ROWS}
    fast, tight = (table_of(hybrid(optimize__heap=heap, **own), cpu) for heap in ("fast", "tight"))
    for phase in ("predict", "restore"):
        freed = sum(
            at(fast, name, phase)
            for name in ("activations", "logits and loss", "workspace", "data")
        )
        assert fast.phases[phase] - tight.phases[phase] == freed > 0
    # the state that comes back, and the weights before the first jump
    assert fast.phases["restore"] - fast.phases["predict"] == 8 * N + 4 * N
    step = fast.phases["full"] - tight.phases["full"]
    assert freed < step


def test_movements_take_the_memory_of_a_slice_of_the_largest_weight() -> None:
    """Five movements of fp32; torch widens a snapshot too. The path: variance, mean and result; numpy subtracts the mean
    in a copy. A GPU also gets the six snapshots of a slice."""

    def work(backend: str, kind: str) -> list[int]:
        step = step_of(hybrid(backend=backend), model_of(GPT2), kind)
        return [m.workspace for m in moments(step, narrow=True, restoring=False)][:2]

    assert work("torch", "cpu") == [4 * 6 * 2**17, 4 * 8 * 2**17]
    assert work("jax", "cpu") == [4 * 5 * 2**17, 4 * 13 * 2**17]
    assert work("torch", "gpu") == [(4 * 6 + 12) * 2**22, (4 * 8 + 12) * 2**22]
    assert work("jax", "gpu") == [0, 0]


def test_jax_libraries_are_priced_for_the_rows_of_a_jump() -> None:
    cpu = device("cpu")
    for rows, precision in ((4, "same"), (8, "bf16")):
        changes = {"train__batch_size": rows, "hybrid__predict_precision": precision}
        plan = hybrid(backend="jax", optimize__heap="tight", **changes)
        table, step = table_of(plan, cpu), step_of(plain(plan), model_of(plan), "cpu")
        less = at(table, "runtime", "full") - at(table, "runtime", "predict")
        assert less == library_bytes(step) - forward_library_bytes(step, rows // 2)
        assert less > 0


def test_jumps_try_16_bit_copies_or_whole_ones() -> None:
    gpu = device("gpu")
    fp32 = table_of(hybrid(hybrid__predict_precision="fp32", **ROWS), gpu)
    assert at(fp32, "weights", "predict") == 8 * N  # as they are, and moved
    bf16 = table_of(hybrid(hybrid__predict_precision="bf16", **ROWS), gpu)
    # fp32 matrices wait on the host; matrices in bf16, vectors in fp32, each as they are and moved
    assert at(bf16, "weights", "predict") == 4 * MATRICES + 8 * (N - MATRICES)


def test_a_phase_has_the_price_of_its_own_precision() -> None:
    gpu = device("gpu")
    plan = hybrid(hybrid__warmup_precision="bf16")
    table = table_of(plan, gpu)
    narrow = table_of(replace(GPT2, {"optimize.precision": "bf16"}), gpu)
    assert table.phases["warmup"] == max(narrow.phases[p] for p in narrow.step_phases)
    assert table.phases["full"] == table_of(hybrid(), gpu).phases["full"]


def test_the_heap_keeps_less_in_warmup_and_full_phases_than_in_a_plain_run() -> None:
    """A tight heap keeps nothing, so the difference from it is what the fast heap keeps."""
    cpu = device("cpu")
    fast, tight = (hybrid(optimize__heap=heap, **ROWS) for heap in ("fast", "tight"))
    tables, steps = (
        [table_of(of(plan), cpu) for plan in (fast, tight)] for of in (lambda plan: plan, plain)
    )
    whole = steps[0].peak_bytes - steps[1].peak_bytes
    share = runtime("torch", "cpu").heaps["fast"].trimmed
    for phase in ("warmup", "full"):
        kept = tables[0].phases[phase] - tables[1].phases[phase]
        assert kept == pytest.approx(share * whole, abs=1)
    assert 0 < share < 1


def test_half_of_a_batch_is_tried_or_whole_micro_batches() -> None:
    gpu = device("gpu")
    one, several = (
        at(table_of(plan, gpu), "logits and loss", "predict")
        for plan in (
            hybrid(train__batch_size=8, hybrid__predict_precision="fp32"),
            hybrid(train__batch_size=4, optimize__accumulation_steps=2, hybrid__predict_precision="fp32"),
        )
    )  # fmt: skip
    assert one == several > 0


def test_the_row_never_saves_at_the_peak_and_says_why() -> None:
    for kind in ("cpu", "gpu"):
        savings = [s for s in estimate(GPT2, device(kind)).savings if s.key == "hybrid.mode"]
        assert {s.value for s in savings} == {"conservative", "balanced", "aggressive"}
        for saving in savings:
            assert saving.saves_bytes <= 0
            assert saving.reason.startswith("memory falls in predict phases only")


def test_a_remedy_switches_it_off_and_says_that_the_result_changes() -> None:
    found = {r.key: r for r in remedies(hybrid(), device("cpu"))}
    assert found["hybrid.mode"].changes == {"hybrid.mode": "off"}
    assert found["hybrid.mode"].saves_bytes == 7 * 2 * N + 4 * N
    assert found["hybrid.mode"].result
    assert "hybrid.mode" not in {r.key for r in remedies(GPT2, device("cpu"))}


@pytest.mark.parametrize(
    ("settings", "key", "words"),
    [
        ({"optimize.precision": "fp16"}, "hybrid.mode", "set optimize.precision = fp32 or bf16"),
        ({"train.batch_size": 1}, "hybrid.mode", "at least 2"),
        ({"hybrid.memory": "cpu", "optimize.optimizer_offload": "pinned"}, "hybrid.memory",
         "set optimize.optimizer_offload = none"),
        ({"hybrid.memory": "compress", "optimize.optimizer": "adafactor"}, "hybrid.memory", "compact"),
        ({"hybrid.snapshot_stride": 7}, "hybrid.snapshot_stride", "at most 6"),
        ({"hybrid.full_steps": 2, "hybrid.snapshot_stride": 1}, "hybrid.snapshot_stride",
         "full_steps to at least 3"),
        ({"hybrid.accumulation": "scale-rate", "train.scale_learning_rate": "sqrt"},
         "hybrid.accumulation", "set train.scale_learning_rate = none"),
        ({"hybrid.accumulation": "scale-rate", "train.on_out_of_memory": "halve"},
         "hybrid.accumulation", "set train.on_out_of_memory = stop"),
    ],
)  # fmt: skip
def test_what_excludes_hybrid_training_is_refused_by_its_key(
    settings: dict[str, Any], key: str, words: str
) -> None:
    check(replace(GPT2, {k: v for k, v in settings.items() if k != "hybrid.mode"}))
    with pytest.raises(PlanError, match=words) as error:
        check(replace(hybrid(), settings))
    assert error.value.key == key
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("how", ["scale-rate", "normalize"])
def test_no_answer_changes_the_number_of_micro_batches_on_which_training_depends(how: str) -> None:
    settings = {
        "train.batch_size": 64,
        "optimize.accumulation_steps": 4,
        "hybrid.accumulation": how,
    }
    plan, gpu = replace(hybrid(), settings), device("gpu")
    tried = [one.optimize.accumulation_steps for one in places(plan, frozenset(), 8)]
    tried += BY_KEY["optimize.accumulation_steps"].tried(plan)
    offered = {
        remedy.key for remedy in remedies(plan, msgspec.structs.replace(gpu, usable_bytes=1))
    }
    kept = how == "scale-rate"
    assert (set(tried) == {4}) is kept
    assert ("optimize.accumulation_steps" not in offered) is kept
    assert [placed(plan, n, "ddp").effective_batch for n in (2, 8)] == [256, 256]


def test_exact_numbers_of_a_step_keep_their_tier() -> None:
    from memconsole.memory.exact.sharpen import KnownExact
    from memconsole.memory.exact.timeline import Exact, ExactPhase

    known = KnownExact(
        exact=Exact(phases={"backward": ExactPhase(total_bytes=1 << 33)}, source="traced")
    )
    gpu = device("gpu")
    table = table_of(hybrid(), gpu, lambda plan, budget: known)
    step = table_of(GPT2, gpu, lambda plan, budget: known)
    assert table.phases["full"] == step.phases["backward"]
    assert (table.phase_tier("full"), table.phase_tier("predict")) == (Tier.EXACT, Tier.FORMULA)
    assert table.tier == Tier.EXACT
    assert table.formula == table_of(hybrid(), gpu)


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_the_band_holds_every_hybrid_run_that_was_measured(backend: str) -> None:
    stored = json.loads((ROOT / "tests/accuracy/results/hybrid.json").read_text())
    (row,) = (r for r in stored["rows"] if r["estimate"].startswith(backend))
    runs: dict[str, list[tuple[int, int]]] = {}
    for case in row["cases"]:
        of = case["plan"].partition(" ")[2]
        runs.setdefault(of, []).append((case["estimated_bytes"], case["measured_bytes"]))
    assert len(runs) == 3
    least = runtime(backend, "cpu").band[0]
    for phases in runs.values():
        estimated, measured = (max(column) for column in zip(*phases, strict=True))
        assert least * estimated <= measured <= PEAK_FACTORS[backend] * estimated
    plan = replace(Plan(), {"backend": backend, "hybrid.mode": "balanced"})
    table = table_of(plan, card(1 << 40, "cpu"))
    assert table.band_bytes[1] >= int(PEAK_FACTORS[backend] * table.peak_bytes)
