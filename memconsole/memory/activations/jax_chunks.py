"""Sizes of the chunks in which the JAX decoder computes its loss and its attention scores.

Follows `backends/memconsole_jax/techniques/activations/fused_loss.py` and `backends/memconsole_jax/models/attention.py`.
"""

from __future__ import annotations

from memconsole.memory.state.step_sizes import StepSizes

CHUNK_TOKENS = 1024
"""`memconsole_jax.techniques.activations.fused_loss.CHUNK_TOKENS`."""
CPU_CHUNK_TOKENS = 128
"""`memconsole_jax.techniques.activations.fused_loss.CPU_CHUNK_TOKENS`."""
SCORE_BYTES = 32 * 2**20
"""`memconsole_jax.models.attention.SCORE_BYTES`."""
CPU_SCORE_BYTES = 4 * 2**20
"""`memconsole_jax.models.attention.CPU_SCORE_BYTES`."""
CPU_ROWS_BYTES = 2 * 2**20
"""`memconsole_jax.models.attention.CPU_ROWS_BYTES`."""
FEWEST_QUERIES = 64
"""`memconsole_jax.models.attention.FEWEST_QUERIES`."""
CPU_QUERIES = 128
"""`memconsole_jax.models.attention.CPU_QUERIES`."""
CPU_GROUPS = 4
"""`memconsole_jax.models.attention.CPU_GROUPS`."""


def loss_chunk_tokens(step: StepSizes, tokens: int) -> int:
    """Tokens whose logits exist at a time. Chunks have equal size, at most `CHUNK_TOKENS` (CPU: `CPU_CHUNK_TOKENS`)."""
    most = CPU_CHUNK_TOKENS if step.kind == "cpu" else CHUNK_TOKENS
    chunks = -(-tokens // most)
    return -(-tokens // chunks)


def score_bytes(step: StepSizes, rows: int, *, dropping: bool = False) -> int:
    """Bytes of the fp32 attention scores of one chunk of queries over `rows` rows; 0 if cuDNN's fused attention runs.
    `dropping`: whether attention weights are dropped."""
    a, length = step.architecture, step.sequence
    isolated, capped = step.plan.data.isolate_documents, a.attention_cap is not None
    written_out = a.windowed(length) or isolated or capped or dropping
    fits_cudnn = a.head_size % 8 == 0 and a.head_size <= 128 and not written_out
    if step.kind == "gpu" and step.compute == 2 and fits_cudnn:
        return 0
    query = 4 * a.heads * length  # bytes of one query's scores
    most = SCORE_BYTES // (rows * query)
    if step.kind == "cpu":
        most = min(CPU_SCORE_BYTES // query, max(CPU_QUERIES, -(-length // CPU_GROUPS)))
    chunks = -(-length // min(length, max(FEWEST_QUERIES, most)))
    queries = -(-length // chunks)
    if step.kind == "cpu":
        most = max(1, CPU_ROWS_BYTES // (query * queries))
        rows = max(n for n in range(1, min(rows, most) + 1) if rows % n == 0)
    return rows * queries * query


def masked_score_bytes(step: StepSizes, one_chunk: int) -> int:
    """Bytes of the scores of masked keys. XLA on a CPU makes them before the loop over blocks, for the chunks of each
    group, unless blocks are recomputed."""
    groups = min(CPU_GROUPS, -(-step.sequence // CPU_QUERIES))
    if step.kind != "cpu" or groups == 1 or step.plan.optimize.gradient_checkpointing != "none":
        return 0
    return one_chunk * (groups + 1) // 2
