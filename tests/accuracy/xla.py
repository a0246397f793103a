"""What XLA plans for the JAX engine's training step on devices that are not there: the truth of the JAX formula.

    python tests/accuracy/xla.py compile TARGET [--plans N] [--first SEED] [--again]   ask XLA, store its answers
    python tests/accuracy/xla.py [report]                                    formula against what is stored
    python tests/accuracy/xla.py fit KIND [--write]                          fit how temporaries overlap

TARGET is cpu or a catalog device: tpu-v5e and tpu-v6e need `pip install "memconsole[tpu]"`, h100-80gb needs
`memconsole[cuda-plan]`; no device is needed. Compiling takes 3-120 s a plan, so that answers are kept in
xla_truths.json, with versions, and reporting and fitting need no compiler. Coefficients are fitted
to plans with even seeds; the report counts odd ones apart.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path
from unittest import mock

import msgspec

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from memconsole.memory import coefficients
from memconsole.memory.activations import jax_step
from memconsole.memory.state.step_sizes import StepSizes, step_of
from memconsole.plan import catalog
from memconsole.plan.models.architecture import Architecture
from memconsole.plan.models.tiles import tile_tokens
from memconsole.plan.plan import Plan, replace
from tests.accuracy.random_plans import of_family
from tests.accuracy.results import MIB, Bar, Case, Errors, Part, write
from tests.accuracy.wide_plans import without_conflicts

TRUTHS = Path(__file__).with_name("xla_truths.json")
COEFFICIENTS = ROOT / "memconsole" / "memory" / "coefficients.json"
BAR = Bar(median=0.05, under=0.10)
TRAINING = ("forward", "loss", "backward", "optimizer step")
UNDER_WEIGHT = 1.4
"""An under-estimate is worse than an over-estimate."""
CAP = 0.4
"""No single plan counts for more than this error."""
ROUNDS = 4000
PULL = 0.08
"""Error, summed over the plans, that a coefficient must explain to move by itself from what the operations alone
would hold: few plans move little."""
COUNTED = {
    "logits": 1.0, "logits_16": 0.5, "logits_16_padded": 0.5, "chunk": 1.0, "chunk_16": 1.5,
    "padded_head": 2.0, "cast_head": 1.0, "early_blocks": 0.0,
    "early_blocks_chunked": 0.0, "loss_stream": 2.0,
    "mlp": 2.0, "mlp_16": 2.0, "mlp_stream": 2.0, "scores": 3.0, "heads": 3.0, "heads_stream": 2.0,
    "layer": 0.0, "rounded_blocks": 0.0, "slice": 0.5, "again": 1.0,
}  # fmt: skip
"""Copies that the operations hold where XLA reuses every buffer it can: logits become their gradient in place."""
COUNTED_BY_KIND = {
    # operands of matmuls are turned into copies
    "cpu": {"scores": 4.0, "layer": 1.0},
    # the gradient of a chunk's logits overwrites them
    "tpu": {"chunk_16": 1.0},
    "gpu": {},
    # gradients of all blocks are allocated before the loss; all that a block kept is copied from the stacks
    "gpu-learned": {"early_blocks": 1.0, "slice": 1.0},
    # 16-bit copies of fp32 operands: under selective checkpointing five of the MLP's widest array more than on a v5e
    "tpu-v6e": {"mlp": 4.5, "chunk_16": 1.0},
}
OWN = ("tpu-v6e",)
"""Targets whose programs overlap otherwise than others of their kind: coefficients are fitted to them alone."""
FAMILIES = ("gpt2", "llama", "llama", "qwen", "gemma", "gemma3")
OPTIMIZERS = ("adamw", "adamw", "adamw", "adamw-8bit", "adafactor", "lion", "sgd")


ALL_SETTINGS = 100
"""The first seed whose plan may have any setting."""
LEARNED_POSITIONS = 200
"""The first seed whose model is a GPT-2, mostly of its sizes."""
EXPERTS = 300
"""The first seed whose model is a mixture of experts. No coefficient is fitted to these plans."""
CATALOG = 400
"""The first seed whose model has the operations of a dense model of the catalog, such as capped logits or parallel blocks. No
coefficient is fitted to these plans."""
TILED = 600
"""The first seed whose plan computes the MLP of such a model in tiles. No coefficient is fitted to these plans."""
FP16 = 700
"""The first seed whose plan trains such a model in fp16 with whole logits. No coefficient is fitted to these plans."""


class Scale(msgspec.Struct, frozen=True):
    """What models and batches are drawn from."""

    hidden: tuple[int, ...]
    head_sizes: tuple[int, ...]
    heads: tuple[int, ...]
    layers: tuple[int, ...]
    vocabularies: tuple[int, ...]
    lengths: tuple[int, ...]
    tokens: tuple[int, ...]


ACCELERATOR = Scale(
    hidden=(256, 512, 768, 1024, 1536, 2048),
    head_sizes=(64, 64, 128),
    heads=(4, 6, 8, 12, 16),
    layers=(2, 4, 6, 8, 12, 16, 24),
    vocabularies=(4096, 8192, 32_000, 50_257, 128_256),
    lengths=(256, 512, 1024, 1024, 2048, 4096),
    tokens=(1024, 2048, 4096, 8192, 16_384),
)
CPU = Scale(
    hidden=(64, 128, 256, 384, 512, 768),
    head_sizes=(16, 32, 64),
    heads=(2, 4, 6, 8),
    layers=(2, 3, 4, 6, 8, 12),
    vocabularies=(300, 1000, 4096, 8192, 32_000, 50_257),
    lengths=(64, 128, 256, 512, 1024),
    tokens=(128, 256, 1024, 2048, 4096, 8192),
)
GPT2 = msgspec.structs.replace(
    ACCELERATOR,
    head_sizes=(64,),
    heads=(8, 12, 12, 16),
    layers=(2, 4, 6, 12, 12, 24),
    vocabularies=(8192, 50_257, 50_257),
    lengths=(512, 1024, 1024),
    tokens=(2048, 4096, 8192, 8192, 16_384),
)


class Truth(msgspec.Struct, frozen=True, kw_only=True):
    """XLA's plan of one drawn training step."""

    target: str
    seed: int
    plan: str
    """`describe` of what the seed drew when it was compiled."""
    planned_bytes: int
    """Arguments, outputs that reuse none, temporaries."""
    argument_bytes: int
    """Of these, all but the temporaries."""
    compiler: str


def kind_of(target: str) -> str:
    return "cpu" if target == "cpu" else catalog.catalog_device(target).kind


def draw(seed: int, kind: str) -> tuple[Architecture, Plan]:
    """A decoder of a size that people train on a `kind` of device, and a plan for it, from a seed."""
    if seed >= FP16:
        return draw_fp16(seed, kind)
    if seed >= TILED:
        return draw_tiled(seed, kind)
    if seed >= CATALOG:
        return draw_of_catalog(seed, kind)
    if seed >= EXPERTS:
        return draw_experts(seed, kind)
    rng = random.Random(seed)
    gpt2 = seed >= LEARNED_POSITIONS
    scale = CPU if kind == "cpu" else GPT2 if gpt2 else ACCELERATOR
    family = "gpt2" if gpt2 else rng.choice(FAMILIES)
    gated, gemma3 = family != "gpt2", family == "gemma3"
    gemma = family in ("gemma", "gemma3")
    head_size = rng.choice(scale.head_sizes)
    heads = rng.choice(scale.heads)
    kv_heads = rng.choice([n for n in range(1, heads + 1) if heads % n == 0]) if gated else heads
    hidden = heads * head_size if not gated else rng.choice(scale.hidden)
    length = rng.choice(scale.lengths)
    if not gated:
        length = min(length, 1024)
    architecture = of_family(
        family,
        vocab_size=rng.choice(scale.vocabularies),
        hidden_size=hidden,
        layers=rng.choice(scale.layers),
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        intermediate_size=4 * hidden if not gated else 128 * int(hidden * rng.uniform(2, 6) / 128),
        max_positions=1024 if not gated else 8192,
        tied_embeddings=gemma or not gated or rng.random() < 0.5,
        sliding_window=rng.choice((512, 1024)) if gemma3 else None,
        global_every=rng.choice((2, 6)) if gemma3 else 1,
    )
    tokens = rng.choice(scale.tokens)
    rank = rng.choice((0, 0, 0, 0, 8, 64))
    plan = replace(
        Plan(),
        {
            "backend": "jax",
            "data.sequence_length": length,
            "train.batch_size": max(1, tokens // length),
            "optimize.precision": rng.choice(("fp32", "bf16", "bf16")),
            "optimize.gradient_checkpointing": rng.choice(
                (*("none",) * (3 if gpt2 else 1), "selective", "full")
            ),
            "optimize.accumulation_steps": rng.choice((1, 1, 4)),
            "optimize.optimizer": rng.choice(OPTIMIZERS),
            "optimize.fused_loss": rng.random() < 0.4,
            "optimize.lora_rank": rank,
            "optimize.freeze_base": rank > 0,
        },
    )
    some_settings = seed < ALL_SETTINGS or gpt2
    return architecture, plan if some_settings else _with_all_settings(rng, plan)


def draw_experts(seed: int, kind: str) -> tuple[Architecture, Plan]:
    """A mixture of experts with the structure of one of the catalog and smaller sizes, and a plan for it."""
    rng, on_cpu = random.Random(seed), kind == "cpu"
    hidden, length = (256, 256) if on_cpu else (1024, 1024)
    name, experts, inner = rng.choice(
        (
            ("olmoe-1b-7b", 32, hidden // 2),
            ("qwen3-30b-a3b", 64, 3 * hidden // 8),
            ("mixtral-8x7b", 8, 7 * hidden // 4),
        )
    )
    whole = catalog.models()[name].architecture
    assert whole is not None
    architecture = msgspec.structs.replace(
        whole,
        vocab_size=rng.choice((2048, 8192) if on_cpu else (16_384, 32_000)),
        hidden_size=hidden,
        layers=rng.choice((2, 4)),
        heads=8,
        kv_heads=8 if name == "olmoe-1b-7b" else 2,
        head_size=hidden // 8,
        intermediate_size=inner,
        experts=experts,
    )
    adapters = rng.random() < 0.35
    plan = replace(
        Plan(),
        {
            "backend": "jax",
            "data.sequence_length": length,
            "train.batch_size": rng.choice((4, 8, 16)),
            "optimize.precision": rng.choice(("fp32", "bf16", "bf16", "bf16-sr")),
            "optimize.gradient_checkpointing": rng.choice(
                ("none", "selective", "attention", "full")
            ),
            "optimize.accumulation_steps": rng.choice((1, 1, 4)),
            "optimize.optimizer": rng.choice(("adamw", "adamw", "adamw-8bit", "sgd")),
            "optimize.fused_loss": rng.random() < 0.5,
            "optimize.lora_rank": 16 if adapters else 0,
            "optimize.freeze_base": adapters,
            "optimize.base_storage": rng.choice(("none", "int8", "nf4")) if adapters else "none",
        },
    )
    return architecture, without_conflicts(plan)


def draw_of_catalog(seed: int, kind: str) -> tuple[Architecture, Plan]:
    """A dense model with the structure of one of the catalog and smaller sizes, and a plan for it with any setting."""
    rng, scale = random.Random(seed), CPU if kind == "cpu" else ACCELERATOR
    entries = [e.architecture for e in catalog.models().values() if e.architecture]
    dense = [a for a in entries if not a.experts]
    family = rng.choice(sorted({a.family for a in dense}))
    whole = rng.choice([a for a in dense if a.family == family])
    head_size = rng.choice((32, 64) if kind == "cpu" else (64, 128))
    kv_heads = rng.choice((2, 4, 8))
    heads = kv_heads * (1 if whole.kv_heads == whole.heads else rng.choice((1, 2, 4)))
    square = whole.family in ("gpt2", "gpt_neox")
    hidden = head_size * (heads if square else rng.choice((4, 8, 12)))
    architecture = msgspec.structs.replace(
        whole,
        vocab_size=rng.choice(scale.vocabularies),
        hidden_size=hidden,
        layers=rng.choice((2, 3, 4, 6, 8)),
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        intermediate_size=128
        * max(1, hidden * whole.intermediate_size // whole.hidden_size // 128),
        rotary_size=whole.rotary_size and head_size * whole.rotary_size // whole.head_size,
        sliding_window=whole.sliding_window and rng.choice((256, 1024)),
    )
    length = min(rng.choice(scale.lengths), whole.max_positions)
    rank = rng.choice((0, 0, 0, 8))
    plan = replace(
        Plan(),
        {
            "backend": "jax",
            "data.sequence_length": length,
            "train.batch_size": max(1, rng.choice(scale.tokens) // length),
            "optimize.precision": rng.choice(("fp32", "bf16")),
            "optimize.gradient_checkpointing": rng.choice(
                ("none", "selective", "attention", "full")
            ),
            "optimize.accumulation_steps": rng.choice((1, 1, 4)),
            "optimize.optimizer": rng.choice(OPTIMIZERS),
            "optimize.fused_loss": rng.random() < 0.3,
            "optimize.lora_rank": rank,
            "optimize.freeze_base": rank > 0,
        },
    )
    return architecture, _with_all_settings(rng, plan)


def draw_tiled(seed: int, kind: str) -> tuple[Architecture, Plan]:
    """A dense model and a plan of `draw_of_catalog` with a tiled MLP, and rows enough for several tiles."""
    rng = random.Random(seed)
    architecture, plan = draw_of_catalog(seed, kind)
    length, o = plan.data.sequence_length, plan.optimize
    tokens = tile_tokens(architecture.hidden_size) * rng.choice((2, 3, 4, 8))
    changes: dict[str, object] = {
        "optimize.tiled_mlp": True,
        "train.batch_size": max(2, tokens // length),
    }
    if o.gradient_checkpointing == "selective":
        changes["optimize.gradient_checkpointing"] = "attention"
    if o.lora_rank:
        changes["optimize.lora_targets"] = rng.choice(("all", "attention", "mlp"))
    return architecture, without_conflicts(replace(plan, changes))


def draw_fp16(seed: int, kind: str) -> tuple[Architecture, Plan]:
    """A dense model and a plan of `draw_of_catalog` in fp16 with whole logits."""
    architecture, plan = draw_of_catalog(seed, kind)
    changes = {"optimize.precision": "fp16", "optimize.fused_loss": False}
    return architecture, without_conflicts(replace(plan, changes))


def _with_all_settings(rng: random.Random, plan: Plan) -> Plan:
    """`plan` with what the first seeds leave alone, where it can stand beside the rest."""
    o = plan.optimize
    wanted = {
        "data.isolate_documents": rng.random() < 0.15,
        "train.ema_decay": rng.choice((0.0, 0.0, 0.99)),
        "optimize.precision": rng.choice((o.precision, "fp16", "bf16-sr")),
        "optimize.optimizer": rng.choice((o.optimizer, o.optimizer, "muon")),
        "optimize.optimizer_offload": rng.choice(("none", "none", "pinned")),
        "optimize.activation_offload": rng.random() < 0.4,
        "optimize.base_storage": rng.choice(("none", "int8", "nf4")),
    }
    return without_conflicts(replace(plan, wanted))


def describe(architecture: Architecture, plan: Plan) -> str:
    """Both in one line."""
    a, o = architecture, plan.optimize
    words = (
        f"{a.family}{' qk-norm' if a.query_key_norm else ''} hidden {a.hidden_size} layers {a.layers}",
        f"vocabulary {a.vocab_size} mlp {a.intermediate_size} heads {a.heads}/{a.kv_heads} x {a.head_size}",
        f"experts {a.experts_per_token} of {a.experts}" if a.experts else "",
        f"window {a.sliding_window}" if a.sliding_window else "",
        f"{'tied' if a.tied_embeddings else 'untied'} {plan.train.batch_size} x {plan.data.sequence_length}",
        o.precision,
        f"checkpointing {o.gradient_checkpointing}" if o.gradient_checkpointing != "none" else "",
        f"accumulation {o.accumulation_steps}" if o.accumulation_steps > 1 else "",
        o.optimizer,
        "chunked loss" if o.fused_loss else "",
        "tiled MLP" if o.tiled_mlp else "",
        f"LoRA {o.lora_rank}" if o.lora_rank else "",
        f"of {o.lora_targets}" if o.lora_targets != "all" else "",
        o.base_storage if o.base_storage != "none" else "",
        f"state {o.optimizer_offload}" if o.optimizer_offload != "none" else "",
        "activations offloaded" if o.activation_offload else "",
        "isolated" if plan.data.isolate_documents else "",
        "averaged" if plan.train.ema_decay else "",
    )
    return " ".join(word for word in words if word)


def stored() -> list[Truth]:
    """What was compiled before, of plans that are still drawn so."""
    if not TRUTHS.exists():
        return []
    found = msgspec.json.decode(TRUTHS.read_bytes(), type=list[Truth])
    return [t for t in found if describe(*draw(t.seed, kind_of(t.target))) == t.plan]


def compile_plans(name: str, seeds: range, again: bool) -> None:
    """Ask XLA, one plan after another; each answer is stored as it comes."""
    from memconsole_jax.tracing import trace_targets
    from tests.training.harness.planned_step import planned_step

    trace_targets.prepare_environment()
    kind = kind_of(name)
    known = set() if again else {(t.target, t.seed) for t in stored()}
    for seed in seeds:
        if (name, seed) in known:
            continue
        architecture, plan = draw(seed, kind)
        started = time.monotonic()
        target = trace_targets.target("" if kind == "cpu" else name, kind)
        planned = planned_step(plan, architecture, target)
        truth = Truth(
            target=name,
            seed=seed,
            plan=describe(architecture, plan),
            planned_bytes=planned.needed,
            argument_bytes=planned.arguments,
            compiler=target.compiler,
        )
        kept = [t for t in stored() if (t.target, t.seed) != (name, seed)]
        kept = sorted([*kept, truth], key=lambda t: (t.target, t.seed))
        TRUTHS.write_bytes(msgspec.json.format(msgspec.json.encode(kept), indent=1) + b"\n")
        seconds = time.monotonic() - started
        print(
            f"{name} {seed:4} {planned.needed / 2**20:9.1f} MiB {seconds:5.0f} s  {truth.plan}",
            flush=True,
        )


def estimated_bytes(seed: int, target: str) -> int:
    """The formula's live bytes at the training step's peak, without the runtime's own."""
    return peak(_step(seed, target))


def _step(seed: int, target: str) -> StepSizes:
    architecture, plan = draw(seed, kind_of(target))
    return step_of(replace(plan, {"device.name": target}), architecture, kind_of(target))


def peak(step: StepSizes) -> int:
    """The largest moment of the training step, as far as XLA plans it."""
    return max(m.total for m in jax_step.moments(step) if m.phase in TRAINING)


def report() -> Part:
    """The formula against everything stored, by target; plans that no coefficient was fitted to."""
    rows = []
    for kind, target in sorted({(_drawn_as(t.seed), t.target) for t in stored()}):
        cases = tuple(
            Case(
                plan=f"{t.seed}: {t.plan}",
                estimated_bytes=estimated_bytes(t.seed, target),
                measured_bytes=t.planned_bytes,
            )
            for t in stored()
            if t.target == target and _drawn_as(t.seed) == kind and not is_fitted(t.seed)
        )
        rows.append(
            Errors(estimate=f"JAX `~`{kind}", truth=f"XLA for {target}", bar=BAR, cases=cases)
        )
    compilers = sorted({t.compiler for t in stored()})
    return Part(
        name="xla",
        command="python tests/accuracy/xla.py report",
        rows=tuple(rows),
        note=f"Compiled by {' and '.join(compilers)}; coefficients were fitted to other plans.",
    )


def _drawn_as(seed: int) -> str:
    """What a seed draws, as the words after an estimate's name."""
    if seed >= FP16:
        return ", fp16 and whole logits"
    if seed >= TILED:
        return ", tiled MLP"
    return ", catalog" if seed >= CATALOG else ", experts" if seed >= EXPERTS else ""


def coefficients_of(truth: Truth) -> str:
    """The name of the coefficients that tell a truth's temporaries."""
    kind = kind_of(truth.target)
    if truth.target in OWN:
        return truth.target
    learned = draw(truth.seed, kind)[0].positions == "learned"
    return f"{kind}-learned" if learned and f"{kind}-learned" in COUNTED_BY_KIND else kind


def is_fitted(seed: int) -> bool:
    """Whether coefficients may be fitted to a seed's plan; the others are reported."""
    return seed % 2 == 0 and seed < EXPERTS


def fit(kind: str) -> dict[str, float | str]:
    """The fields of `coefficients.Overlap` that explain best the stored truths whose coefficients are called `kind`, by
    random descent from what is counted, on the mean error, an under-estimate weighing more."""
    cases = [
        (_step(t.seed, t.target), t.planned_bytes)
        for t in stored()
        if kind == coefficients_of(t) and is_fitted(t.seed)
    ]
    counted = COUNTED | COUNTED_BY_KIND[kind]

    def cost(values: dict[str, float]) -> float:
        overlap = coefficients.Overlap(**values, source="")
        with mock.patch.object(jax_step, "xla", return_value=overlap):
            errors = [peak(step) / truth - 1 for step, truth in cases]
        missed = sum(min(CAP, abs(e)) * (1 if e > 0 else UNDER_WEIGHT) for e in errors)
        moved = sum(abs(values[n] - counted[n]) / (counted[n] + 0.5) for n in counted)
        return (missed + PULL * moved) / len(errors)

    rng = random.Random(1)
    best, width = dict(counted), 0.4
    lowest = cost(best)
    for round_ in range(ROUNDS):
        name = rng.choice(list(counted))
        changed = {**best, name: max(0.0, best[name] + rng.gauss(0, width))}
        found = cost(changed)
        if found < lowest:
            lowest, best = found, changed
        if round_ % (ROUNDS // 4) == ROUNDS // 4 - 1:
            width /= 2
    source = (
        f"fitted by `python tests/accuracy/xla.py fit {kind} --write` to XLA's own plan of {len(cases)} random "
        f"training steps; mean weighted error and pull {lowest:.1%}"
    )
    return {**{name: round(value, 2) for name, value in best.items()}, "source": source}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command")
    asked = commands.add_parser("compile")
    asked.add_argument("target")
    asked.add_argument("--plans", type=int, default=24)
    asked.add_argument("--first", type=int, default=0)
    asked.add_argument(
        "--again", action="store_true", help="what is stored, too: the engine changed"
    )
    fitted = commands.add_parser("fit")
    fitted.add_argument("kind", choices=tuple(COUNTED_BY_KIND))
    fitted.add_argument("--write", action="store_true")
    commands.add_parser("report")
    arguments = parser.parse_args()
    if arguments.command == "compile":
        seeds = range(arguments.first, arguments.first + arguments.plans)
        compile_plans(arguments.target, seeds, arguments.again)
    elif arguments.command == "fit":
        found = fit(arguments.kind)
        print(found)
        if arguments.write:
            document = json.loads(COEFFICIENTS.read_text())
            document["xla"][arguments.kind] = found
            COEFFICIENTS.write_text(json.dumps(document, indent=1) + "\n")
    else:
        part = report()
        for row in part.rows:
            for case in getattr(row, "cases", ()):
                print(f"{case.error:+7.1%} {case.measured_bytes / MIB:9.1f} MiB  {case.plan}")
        write(part, ("jax",))


if __name__ == "__main__":
    main()
