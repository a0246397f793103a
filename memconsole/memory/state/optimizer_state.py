"""Bytes of each optimizer's state, where it is stored between steps, and the temporaries of an update."""

from __future__ import annotations

import math
from itertools import pairwise

import msgspec

from memconsole.memory.state.sizes import QUANTIZED_FROM, Group, orthogonalizing
from memconsole.plan.machine.triton_kinds import TRITON_KINDS
from memconsole.plan.sections.optimize import EIGHT_BIT
from memconsole.plan.training.matrices import together

BLOCK = 256
"""Elements sharing one fp32 scale in 8-bit state (Dettmers et al. 2021, block-wise quantization)."""
TABLE_BYTES = 2 * 2**16 + 2 * 4 * 2**8
"""Lookup tables between rounded values and codes in both directions, signed and unsigned."""
SLICE = {"torch": (2**17, 2**22), "jax": (2**17, 2**20)}
"""Elements that an 8-bit step widens to fp32 at a time: (on a CPU, elsewhere)."""
SLICE_BYTES = {"torch": 16, "jax": 32}
"""Temporary bytes of one such element: the moments in fp32, and what quantizing them needs."""
ROUNDED_SLICE = {"torch": (2**19, 2**22), "jax": (2**17, 2**20)}
"""Elements processed at a time of tensors stored in bf16 with stochastic rounding: (on a CPU, elsewhere)."""
ROUNDING_BYTES = 3
"""Bytes of random numbers for each element that torch rounds to bf16 stochastically; XLA and Triton fuse them away."""


class State(msgspec.Struct, frozen=True, kw_only=True):
    """Optimizer bytes."""

    resident: int
    """On the device between steps."""
    at_step: int
    """On the device during the optimizer step."""
    host: int
    """In host memory between steps."""
    temporaries: int
    """Temporaries of the optimizer step."""
    average: int = 0
    """The part of `resident` that is the moving average of the trained weights."""

    def with_average(self, average: int) -> State:
        """This state plus `average` bytes of a moving average, which stays on the device."""
        return msgspec.structs.replace(
            self,
            resident=self.resident + average,
            at_step=self.at_step + average,
            average=average,
        )


def state_bytes(optimizer: str, trained: Group, *, compressed: bool = False) -> int:
    """Bytes of the whole optimizer state of the trained weights. `compressed`: moments in bf16."""
    if compressed:
        return state_bytes(optimizer, trained) // 2
    n = trained.elements
    if optimizer == "adamw":
        return 8 * n
    if optimizer in EIGHT_BIT:
        narrow = trained.quantizable + (trained.tables if optimizer == "adamw8-all" else 0)
        return 2 * narrow + 2 * 4 * -(-narrow // BLOCK) + 8 * (n - narrow)
    if optimizer == "adafactor":
        return 4 * trained.factored
    if optimizer == "muon":
        return 4 * trained.orthogonal + 8 * (n - trained.orthogonal)
    if optimizer == "apollo-mini":
        return 4 * trained.projections + 8 * (n - trained.projected)
    return 4 * n  # lion and sgd have one moment


def step_temporaries(backend: str, kind: str, optimizer: str, trained: Group) -> int:
    """Temporary bytes of one update. Both backends update tensor by tensor. Of a tensor that holds many matrices, Muon and
    Adafactor update a few matrices at a time. torch's AdamW and SGD use one fused kernel on CPU, CUDA and ROCm.

    On MPS they are neither fused nor use foreach (torch 2.11 to 2.13, `_get_foreach_kernels_supported_devices`).
    There AdamW computes a root and the denominator while the previous tensor's denominator is still live, and SGD
    copies the gradient for weight decay. In torch, lion frees a tensor's update only after the next one is computed.
    """
    unfused = backend == "torch" and kind not in ("cpu", "gpu", "rocm")
    if optimizer == "adamw":
        return 4 * max(trained.pair_twice, 2 * trained.largest) if unfused else 0
    if optimizer == "sgd":
        return 4 * trained.largest if unfused else 0
    if optimizer in EIGHT_BIT:
        if backend == "torch" and kind in TRITON_KINDS:
            return TABLE_BYTES
        most = SLICE[backend][kind != "cpu"]
        # torch's buffers always have the size of a full slice. Code tables come on top.
        widened = min(trained.largest, most) if backend == "jax" else most
        return SLICE_BYTES[backend] * widened + TABLE_BYTES
    if optimizer == "apollo-mini":  # other weights are updated as AdamW updates them
        return 4 * trained.pair if unfused else 0
    if optimizer == "muon":  # JAX copies one layer's weight before it takes matrices from it
        return 4 * (trained.orthogonalizing + (trained.several if backend == "jax" else 0))
    if backend == "torch":
        return 4 * (trained.together if optimizer == "adafactor" else trained.pair)
    return 0  # XLA updates donated arrays in place


def compressed_temporaries(backend: str, kind: str, optimizer: str, one: Group) -> int:
    """Temporary bytes of updating one weight whose moments are stored in bf16: one slice in fp32, and its rounding."""
    if optimizer == "muon" and not one.orthogonal:
        optimizer = "adamw"
    n = one.together
    if optimizer != "muon":
        n = min(one.elements, ROUNDED_SLICE[backend][kind != "cpu"])
    moments = 2 if optimizer == "adamw" else 1
    part = msgspec.structs.replace(one, elements=n, largest=n, pair=n, pair_twice=2 * n)
    rule = step_temporaries(backend, kind, optimizer, part)
    if backend == "jax":  # old and new slices of gradient and moments
        return 2 * (4 + 2 * moments) * n + rule
    rounding = 0 if kind in TRITON_KINDS else ROUNDING_BYTES
    return 4 * moments * n + max(rule, rounding * n)


def _alone(one: Group) -> Group:
    """The same weight, without the temporaries of its predecessor."""
    return msgspec.structs.replace(one, pair=one.largest, pair_twice=2 * one.largest)


def update_bytes(
    kind: str,
    optimizer: str,
    shape: tuple[int, ...],
    *,
    offloaded: bool,
    compressed: bool = False,
    rounded: bool = False,
    outside: bool = False,
    matrices: int = 1,
) -> int:
    """Temporary bytes of updating one weight alone in torch. `offloaded`: its state is copied from the host.
    `compressed`: its moments are in bf16. `rounded`: matrices are stored in bf16. `outside`: it is not in a block.
    `matrices`: how many it holds."""
    size = math.prod(shape)
    matrix = len(shape) > 1
    one_shape = (shape[0] // matrices, *shape[1:])
    at_once = together(matrices, size // matrices)
    large = matrix and size >= QUANTIZED_FROM
    one = Group(
        elements=size,
        factored=matrices * sum(one_shape),
        quantizable=size if large and not outside else 0,
        tables=size if large and outside else 0,
        orthogonal=size,
        projected=size if matrix and not outside else 0,
        projections=matrices * (2 * max(one_shape) + 1) if matrix and not outside else 0,
        largest=size,
        pair=size,
        pair_twice=2 * size,
        orthogonalizing=at_once * orthogonalizing(one_shape) if matrix else 0,
        together=at_once * size // matrices,
    )
    if optimizer in ("muon", "apollo-mini") and (outside or not matrix):
        optimizer = "adamw"
    copied_state = state_bytes(optimizer, one, compressed=compressed) if offloaded else 0
    if rounded and matrix:
        return copied_state + rounded_temporaries(kind, optimizer, one, compressed=compressed)
    if compressed:
        return copied_state + compressed_temporaries("torch", kind, optimizer, one)
    if optimizer == "adafactor" and not matrix:
        return copied_state
    return copied_state + step_temporaries("torch", kind, optimizer, one)


def rounded_temporaries(kind: str, optimizer: str, one: Group, *, compressed: bool) -> int:
    """Temporary bytes of updating one bf16 weight in torch: a slice of it and of its gradient in fp32, plus the update
    rule's own temporaries. Adafactor and Muon need whole matrices instead of a slice."""
    if optimizer == "muon" and not one.orthogonal:
        optimizer = "adamw"
    if optimizer == "apollo-mini" and not one.projected:
        optimizer = "adamw"
    size = one.together
    if optimizer not in ("adafactor", "apollo-mini", "muon"):
        size = min(one.largest, ROUNDED_SLICE["torch"][kind != "cpu"])
    part = msgspec.structs.replace(one, elements=size, largest=size, pair=size, pair_twice=2 * size)
    of_rule = compressed_temporaries if compressed else step_temporaries
    return 8 * size + of_rule("torch", kind, optimizer, part)


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """The settings that decide an optimizer's bytes for given weights."""

    optimizer: str
    offload: str
    rounded: bool
    """Whether weights are stored in bf16 only, without an fp32 copy."""
    backend: str
    kind: str
    shards: int


def state(rule: Rule, trained: Group, order: tuple[Group, ...]) -> State:
    """The optimizer's bytes on one device, with the plan's sharding and offload.

    `order`: the trained weights one by one, without repeats of identical blocks.
    """
    optimizer, backend, kind = rule.optimizer, rule.backend, rule.kind
    compressed = rule.offload == "compressed"
    whole = -(-state_bytes(optimizer, trained, compressed=compressed) // rule.shards)
    rounded = rule.rounded and backend == "torch"
    # A torch process updates the rows that it holds as tensors of their own.
    parts = rule.shards if backend == "torch" else 1

    def temporaries(of: Group) -> int:
        if rounded:
            return rounded_temporaries(kind, optimizer, of, compressed=compressed)
        if not compressed:
            return step_temporaries(backend, kind, optimizer, of)
        # An fp32 update does not fit into the buffer of a bf16 gradient.
        update = 4 * of.elements if rule.rounded else 0
        return update + compressed_temporaries(backend, kind, optimizer, of)

    if rule.offload != "none" and kind not in ("cpu", "apple"):
        # While one weight is updated, its state is in use and that of the next one is copied.
        each = [-(-state_bytes(optimizer, one, compressed=compressed) // parts) for one in order]
        used = [-(-temporaries(_alone(one)) // parts) for one in order]
        updates = zip(map(sum, pairwise([*each, 0])), used, strict=True)
        at_step, most = max(updates, key=sum, default=(whole, 0))
        return State(resident=0, at_step=at_step, host=whole, temporaries=most)
    one_by_one = compressed or rounded
    most = max(map(temporaries, order), default=0) if one_by_one else temporaries(trained)
    return State(resident=whole, at_step=whole, host=0, temporaries=-(-most // parts))
