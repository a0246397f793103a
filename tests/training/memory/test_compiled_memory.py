"""What a block holds and computes under torch.compile: the formula and the plain block against really compiled ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from memconsole.memory.activations.block_programs import Live
from memconsole.memory.activations.torch_blocks import kernels_of
from memconsole.memory.activations.torch_compiled import compiled_block
from memconsole.memory.state.step_sizes import step_of
from memconsole.plan import catalog
from memconsole.plan.machine.compilers import missing_compiler
from memconsole.plan.models.architecture import Architecture
from memconsole.plan.plan import Plan, replace
from memconsole_trainer.weights.initialize import InitialWeights

torch = pytest.importorskip("torch")

from torch._inductor.async_compile import AsyncCompile
from torch.profiler import ProfilerActivity, profile, record_function

from memconsole_torch.engine import TorchEngine
from memconsole_torch.models.rotary import rotation_of
from memconsole_torch.techniques import compilation
from memconsole_torch.techniques.weights import precision

ROWS, LENGTH = 4, 128
TOKENS = ROWS * LENGTH
SETTINGS = {
    "data.sequence_length": LENGTH,
    "train.batch_size": ROWS,
    "optimize.compile": True,
}
pytestmark = [
    pytest.mark.skipif(bool(missing_compiler("cpu")), reason="no C++ compiler on this machine"),
    pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def forget_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def small(model: str) -> Architecture:
    """One layer of a model of the catalog, with sizes that tell each tensor from the others."""
    whole = catalog.models()[model].architecture
    assert whole is not None
    return msgspec.structs.replace(
        whole,
        layers=1,
        vocab_size=512,
        hidden_size=96,
        intermediate_size=264,
        heads=6,
        kv_heads=6 if whole.kv_heads == whole.heads else 2,
        head_size=16,
        rotary_size=None if whole.rotary_size is None else 4,
    )


def measured(plan: Plan, a: Architecture, computes: bool = True) -> tuple[int, int, int]:
    """Bytes beyond its input that a compiled block keeps, and holds most in its forward and its backward pass, whose
    results are those of the plain block if it `computes`."""
    device = torch.device("cpu")
    engine = TorchEngine(plan, device)
    engine.build(plan, a, 10, InitialWeights(a, 0))
    block = engine.module.layers[0]
    rotary = rotation_of(a, LENGTH, local=False, device=device)
    trained = [p for p in block.parameters() if p.requires_grad]
    # The same numbers each time: of 60 inputs, one had a gradient of a key's norm in bf16 that differed by 2.1 %.
    same = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, LENGTH, a.hidden_size, generator=same, requires_grad=True)
    above = torch.randn(ROWS, LENGTH, a.hidden_size, generator=same)
    with compilation.paused(), precision.forward_context(device, plan.optimize.precision):
        y = block(x, rotary, None)
    plain = [y, *torch.autograd.grad(y, [x, *trained], above)]
    del y
    assert not torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for _ in range(2):  # the first pass compiles
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            with precision.forward_context(device, plan.optimize.precision):
                y = block(x, rotary, None)
            with record_function("behind the forward pass"):
                gradients = torch.autograd.grad(y, [x, *trained], above)
        compiled = [y.detach(), *gradients]
        del y, gradients
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    if computes:
        assert_near(plan, plain, compiled)
    events = profiler.profiler.kineto_results.events()
    turn = next(e.start_ns() for e in events if e.name() == "behind the forward pass")
    allocations = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    live = kept = forward = backward = 0
    for start, size in allocations:
        live += size
        if start < turn:
            kept, forward = live, max(forward, live)
        else:
            backward = max(backward, live)
    # The profiler's backward pass has the block's output beside it, in the place of that output's gradient.
    return kept - 4 * a.hidden_size * TOKENS, forward, backward


def assert_near(plan: Plan, plain: list[Any], compiled: list[Any]) -> None:
    most = 1e-5 if plan.optimize.precision == "fp32" else 0.02
    # Softmax leaves a key's bias no gradient but rounding.
    least = 1e-3 * max(one.norm() for one in plain)
    for one, other in zip(plain, compiled, strict=True):
        assert (one - other).norm() <= most * max(one.norm(), least)


def widest(moments: tuple[Live, ...], a: Architecture) -> int:
    scores = TOKENS * LENGTH
    return max(m.total.bytes(TOKENS, scores) for m in moments) - 4 * a.hidden_size * TOKENS


CASES: list[tuple[str, dict[str, Any], float]] = [
    ("gpt2", {"precision": "bf16"}, 0.06),
    ("gemma-3-1b", {"precision": "bf16"}, 0.06),
    ("pythia-70m", {"precision": "bf16"}, 0.06),
    ("pythia-70m", {"gradient_checkpointing": "selective"}, 0.02),
    ("qwen3-0.6b", {"gradient_checkpointing": "selective"}, 0.02),
    # Priced as if attention's half was made again at once with the MLP's, which waits in truth.
    ("qwen3-0.6b", {"gradient_checkpointing": "attention"}, 0.23),
    ("llama-3.2-1b", {"gradient_checkpointing": "full"}, 0.04),
    ("llama-3.2-1b", {"lora_rank": 8, "freeze_base": True}, 0.04),
    ("olmo-2-1b", {"lora_rank": 8, "freeze_base": True}, 0.01),
    ("olmo-2-1b", {"lora_rank": 8, "freeze_base": True, "precision": "bf16"}, 0.01),
]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "changes", "near"), CASES, ids=str)
def test_a_compiled_block_holds_what_the_formula_says_and_computes_the_same(
    model: str, changes: dict[str, Any], near: float
) -> None:
    assert_priced(model, changes, near, computes=True)


def test_a_compiled_program_allocates_what_the_formula_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Inductor's own program, whose kernels compute nothing: to build them takes half a minute of a core."""
    monkeypatch.setattr(AsyncCompile, "cpp_pybinding", lambda *of, **more: lambda *arrays: None)
    monkeypatch.setattr(torch._inductor.config.cpp, "vec_isa_ok", True)  # not tried by a build
    assert_priced(*CASES[0], computes=False)


def assert_priced(model: str, changes: dict[str, Any], near: float, computes: bool) -> None:
    architecture = small(model)
    plan = replace(Plan(), SETTINGS | {f"optimize.{k}": v for k, v in changes.items()})
    kept, forward, backward = measured(plan, architecture, computes)
    program = compiled_block(architecture, kernels_of(step_of(plan, architecture, "cpu")))
    expected = widest((program.kept,), architecture)
    assert expected == pytest.approx(kept, rel=0.01, abs=16 * TOKENS)
    assert widest(program.forward, architecture) == pytest.approx(forward, rel=near)
    assert widest(program.backward, architecture) == pytest.approx(backward, rel=near)
