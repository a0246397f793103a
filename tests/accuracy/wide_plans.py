"""Random plans over every family and every setting that the torch backend trains, on a CPU and on a GPU.

Seeds from `EXPERTS` on draw mixtures of experts, those from `TILED` on plans with a tiled MLP. Of dense models, half are
drawn from scratch, with sizes that are no round numbers; half have the sizes of a model of the catalog, up to 8 billion
parameters: a trace of fake tensors allocates nothing. Most of the latter keep a few of their layers, because a trace takes
time with each and every layer costs the same.
"""

from __future__ import annotations

import random

import msgspec

from memconsole.plan import catalog
from memconsole.plan.models.architecture import Architecture
from memconsole.plan.plan import Plan, get, replace
from memconsole.plan.toggles.optimizations import conflict
from tests.accuracy.random_plans import of_family

OPTIMIZERS = ("adamw", "adamw", "adamw-8bit", "adafactor", "lion", "muon", "sgd")
FAMILIES = ("gpt2", "llama", "llama", "qwen", "gemma", "gemma3")
LAYERS = (1, 2, 2, 3)
DEEP_SHARE = 0.03
"""Of catalog models, those that keep all their layers."""
MOST_LAYERS = 18
"""Of those."""
EXPERTS = 3000
"""The first seed that draws a mixture of experts."""
TILED = 6000
"""The first seed whose plan computes the MLP of a dense model in tiles."""


class Case(msgspec.Struct, frozen=True):
    """A model, a plan for it, and the kind of device it is priced on."""

    architecture: Architecture
    plan: Plan
    kind: str


def draw(seed: int, *, whole: bool = False) -> Case:
    """The plan of a seed. `whole`: for a dense model of the catalog with all its layers."""
    rng = random.Random(seed)
    kind = rng.choice(("cpu", "gpu"))
    if whole:
        architecture, lengths, batches = _from_catalog(rng, layers=None), (64, 4096), (1, 16)
    elif EXPERTS <= seed < TILED:
        architecture, lengths, batches = _mixture(rng), (8, 1024), (1, 8)
    elif rng.random() < 0.5:
        architecture, lengths, batches = _drawn(rng), (8, 509), (1, 9)
    else:
        architecture, lengths, batches = _from_catalog(rng), (64, 2048), (1, 8)
    plan = _plan(rng, architecture, lengths, batches)
    return Case(architecture, _tiled(rng, plan) if seed >= TILED else plan, kind)


def describe(case: Case) -> str:
    """All of it in one line."""
    a, o, d = case.architecture, case.plan.optimize, case.plan.data
    words = [
        f"{case.kind} {a.family}{' qk-norm' if a.query_key_norm else ''} hidden {a.hidden_size} layers {a.layers}",
        f"{a.experts} experts, {a.experts_per_token} a token," if a.experts else "",
        f"vocabulary {a.vocab_size} mlp {a.intermediate_size} heads {a.heads}/{a.kv_heads} x {a.head_size}",
        f"{'tied' if a.tied_embeddings else 'untied'}{' biases' if a.biases else ''}",
        f"{case.plan.train.batch_size} x {d.sequence_length} {o.precision}",
        f"checkpointing {o.gradient_checkpointing}" if o.gradient_checkpointing != "none" else "",
        f"accumulation {o.accumulation_steps}" if o.accumulation_steps > 1 else "",
        o.optimizer,
        "chunked loss" if o.fused_loss else "",
        "tiled MLP" if o.tiled_mlp else "",
        f"LoRA {o.lora_rank}" if o.lora_rank else "",
        f"of {o.lora_targets}" if o.lora_targets != "all" else "",
        o.base_storage if o.base_storage != "none" else "",
        f"state {o.optimizer_offload}" if o.optimizer_offload != "none" else "",
        "in backward" if o.optimizer_in_backward else "",
        "activations offloaded" if o.activation_offload else "",
        "isolated" if d.isolate_documents else "",
        "averaged" if case.plan.train.ema_decay else "",
    ]
    return " ".join(word for word in words if word)


def _drawn(rng: random.Random) -> Architecture:
    """A decoder of any shape, of at most some ten million weights."""
    family = rng.choice(FAMILIES)
    gated, gemma3 = family != "gpt2", family == "gemma3"
    gemma = family in ("gemma", "gemma3")
    heads = rng.choice((1, 2, 3, 4, 6, 8, 12))
    kv_heads = rng.choice([n for n in range(1, heads + 1) if heads % n == 0]) if gated else heads
    head_size = rng.choice((8, 16, 32, 64, 128))
    hidden = heads * head_size if not gated else 8 * rng.randint(4, 64)
    return of_family(
        family,
        vocab_size=rng.choice((257, 1000, 4099, 16_384, 50_257)),
        hidden_size=hidden,
        layers=rng.choice((1, 2, 2, 3, 4, 7)),
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        intermediate_size=8 * int(hidden * rng.uniform(1, 8) / 8),
        max_positions=rng.choice((512, 1024)),
        tied_embeddings=gemma or not gated or rng.random() < 0.5,
        sliding_window=rng.choice((32, 600)) if gemma3 else None,
        global_every=rng.choice((2, 3)) if gemma3 else 1,
    )


def _mixture(rng: random.Random) -> Architecture:
    """A mixture of experts with the operations of a catalog model, of its sizes or of small ones."""
    entries = [e.architecture for e in catalog.models().values() if e.architecture]
    whole = rng.choice([a for a in entries if a.experts])
    layers = rng.choice(LAYERS)
    if rng.random() < 0.3:
        return msgspec.structs.replace(whole, layers=layers)
    keys, groups, experts = rng.choice((1, 2, 4)), rng.choice((1, 2, 3)), rng.choice((4, 8, 32))
    return msgspec.structs.replace(
        whole,
        layers=layers,
        vocab_size=rng.choice((300, 4096, 32_000)),
        hidden_size=64 * rng.randint(1, 16),
        heads=keys * groups,
        kv_heads=keys,
        head_size=rng.choice((16, 32, 64)),
        intermediate_size=64 * rng.randint(1, 16),
        experts=experts,
        experts_per_token=rng.choice((1, 2, 4)),
    )


def _from_catalog(rng: random.Random, layers: tuple[int, ...] | None = LAYERS) -> Architecture:
    """A model of the catalog with one of `layers` as its depth; None: with its own."""
    entries = catalog.models().values()
    names = [e.name for e in entries if e.architecture is not None and not e.architecture.experts]
    while True:
        whole = catalog.architecture(replace(Plan(), {"model.name": rng.choice(names)}))
        if layers is None:
            return whole
        if rng.random() >= DEEP_SHARE:
            depth = min(whole.layers, rng.choice(layers))
            return msgspec.structs.replace(whole, layers=depth)
        if whole.layers <= MOST_LAYERS:
            return whole


def _plan(
    rng: random.Random,
    architecture: Architecture,
    lengths: tuple[int, int],
    batches: tuple[int, int],
) -> Plan:
    shortest, longest = lengths
    if architecture.positions == "learned":
        longest = min(longest, architecture.max_positions)
    length = rng.randint(shortest, longest)
    if rng.random() < 0.5:
        length = max(8, 64 * (length // 64))
    rank = rng.choice((0, 0, 0, 1, 8, 64))
    plan = replace(
        Plan(),
        {
            "data.sequence_length": length,
            "data.isolate_documents": rng.random() < 0.15,
            "train.batch_size": rng.randint(*batches),
            "train.grad_clip": rng.choice((0.0, 1.0)),
            "train.ema_decay": rng.choice((0.0, 0.0, 0.0, 0.99)),
            "optimize.precision": rng.choice(("fp32", "fp32", "bf16", "bf16", "fp16", "bf16-sr")),
            "optimize.gradient_checkpointing": rng.choice(("none", "none", "selective", "full")),
            "optimize.accumulation_steps": rng.choice((1, 1, 2, 5)),
            "optimize.optimizer": rng.choice(OPTIMIZERS),
            "optimize.optimizer_offload": rng.choice(("none", "none", "none", "cpu", "pinned")),
            "optimize.optimizer_in_backward": rng.random() < 0.3,
            "optimize.activation_offload": rng.random() < 0.2,
            "optimize.fused_loss": rng.random() < 0.4,
            "optimize.lora_rank": rank,
            "optimize.freeze_base": rank > 0,
            "optimize.base_storage": rng.choice(("none", "none", "int8", "nf4")),
        },
    )
    return without_conflicts(plan)


def _tiled(rng: random.Random, plan: Plan) -> Plan:
    """`plan` with a tiled MLP, another checkpointing than `selective`, and adapters on some of the matrices."""
    o = plan.optimize
    changes: dict[str, object] = {"optimize.tiled_mlp": True}
    if o.gradient_checkpointing == "selective":
        changes["optimize.gradient_checkpointing"] = "attention"
        changes["optimize.activation_offload"] = False
    if o.lora_rank:
        changes["optimize.lora_targets"] = rng.choice(("all", "attention", "query-value", "mlp"))
    return replace(plan, changes)


def without_conflicts(plan: Plan) -> Plan:
    """`plan` with the default in place of every setting that cannot stand beside the others."""
    while found := conflict(plan):
        plan = replace(plan, {found[0]: get(Plan(), found[0])})
    return plan
