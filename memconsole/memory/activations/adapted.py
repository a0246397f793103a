"""Bytes that a block of torch does not hold where only some of its matrices have adapters. The stored programs are those of
blocks in which all matrices have one. Experts never have any."""

from __future__ import annotations

from memconsole.memory.activations.kernels import Kernels
from memconsole.memory.state.sizes import adapted_block
from memconsole.plan.models.architecture import Architecture


def not_kept(a: Architecture, k: Kernels) -> int:
    """Bytes per token that one block does not keep: inputs that only a missing adapter reads again, and the outputs
    (rank) of the missing adapters' first products. Attention keeps its own output."""
    if k.targets == "all" or k.checkpointing in ("attention", "full"):
        return 0
    if k.tile:
        return _not_kept_beside_tiles(a, k)
    missing = adapted_block(a, "all").adapted - adapted_block(a, k.targets).adapted
    low = k.compute * k.rank * missing
    if k.checkpointing == "selective" or a.experts:
        return low
    return low + k.compute * (a.hidden_size + (0 if k.targets == "mlp" else a.intermediate_size))


def _not_kept_beside_tiles(a: Architecture, k: Kernels) -> int:
    """`not_kept` if the MLP is computed in tiles: it keeps its input and nothing else, with adapters and without."""
    of_attention = adapted_block(a, "attention").adapted
    present = 0 if k.targets == "mlp" else adapted_block(a, k.targets).adapted
    low = k.compute * k.rank * (of_attention - present)
    return low + (k.compute * a.hidden_size if k.targets == "mlp" else 0)


def not_made(a: Architecture, k: Kernels) -> int:
    """Bytes per token of an adapter's output in the MLP, which a forward pass without adapters there does not hold. Where
    attention makes scores it may hold more than the MLP, so nothing is left out. Beside tiles it is what attention does
    not keep."""
    if k.tile:
        return not_kept(a, k)
    if k.targets in ("all", "mlp") or k.queries or k.kind == "apple" or a.experts:
        return 0
    return k.compute * a.intermediate_size


def not_read(a: Architecture, k: Kernels) -> int:
    """Bytes per token that a backward pass does not hold: a norm's output that no adapter reads again. Beside tiles the peak is
    in the MLP, where all that attention does not keep is missing."""
    if k.targets == "all" or a.experts:
        return 0
    return _not_kept_beside_tiles(a, k) if k.tile else k.compute * a.hidden_size


def not_kept_first(a: Architecture, k: Kernels) -> int:
    """The same as `not_kept` for the first block of a frozen base, in addition: without adapters its attention needs no
    backward pass, and keeps neither rotated queries and keys, values, output and the logarithms of its sums over scores,
    nor the input of the norm after it, if that reads attention's output. A parallel MLP needs none either without
    adapters, and keeps no inner outputs. Checkpointed, only the halves of a parallel block are apart."""
    mode = k.checkpointing
    if k.targets == "all" or mode == "full" or (mode != "none" and not a.parallel_residual):
        return 0
    if k.targets != "mlp":
        inner = 0 if mode == "attention" else (2 if a.gated_mlp else 1) * a.intermediate_size
        inner = a.hidden_size if k.tile else inner
        return k.compute * inner if a.parallel_residual else 0
    if mode == "attention":
        return k.compute * a.query_width + 4 * a.heads
    statistics = 8 if a.norm == "layernorm" else 4
    attention = 2 * k.compute * (a.query_width + a.key_width) + 4 * a.heads
    if a.parallel_residual:
        return attention
    return attention + 4 * a.hidden_size + statistics


def share(a: Architecture, k: Kernels) -> float:
    """The elements of the adapters, divided by what they would be if all matrices had one."""
    if k.targets == "all":
        return 1.0
    return adapted_block(a, k.targets).adapter_width / adapted_block(a, "all").adapter_width
