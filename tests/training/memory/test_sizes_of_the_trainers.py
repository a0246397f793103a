"""The sizes that estimates repeat from the trainers, which the console cannot import, are still the trainers' own."""

from __future__ import annotations

import pkgutil

import pytest

FRAMEWORKS = {"memconsole_torch": "torch", "memconsole_jax": "jax", "memconsole_trainer": "numpy"}


@pytest.mark.parametrize(
    ("counted", "used"),
    [
        ("activations.block_programs.DECODED_CPU", "torch.models.codes.CPU_SLICE"),
        ("activations.block_programs.DECODED_DEVICE", "torch.models.codes.DEVICE_SLICE"),
        ("activations.jax_experts.CPU_MOST_ROWS", "jax.models.experts.CPU_MOST_ROWS"),
        ("activations.jax_experts.FEWEST_ROWS", "jax.models.experts.FEWEST_ROWS"),
        ("activations.jax_experts.MOST_ROWS", "jax.models.experts.MOST_ROWS"),
        ("activations.jax_gathered.ALIGNED_ROWS", "jax.techniques.activations.fused_loss.ALIGNED_ROWS"),
        ("activations.jax_chunks.CHUNK_TOKENS", "jax.techniques.activations.fused_loss.CHUNK_TOKENS"),
        ("activations.jax_chunks.CPU_CHUNK_TOKENS", "jax.techniques.activations.fused_loss.CPU_CHUNK_TOKENS"),
        ("activations.jax_chunks.CPU_GROUPS", "jax.models.attention.CPU_GROUPS"),
        ("activations.jax_chunks.CPU_QUERIES", "jax.models.attention.CPU_QUERIES"),
        ("activations.jax_chunks.CPU_ROWS_BYTES", "jax.models.attention.CPU_ROWS_BYTES"),
        ("activations.jax_chunks.CPU_SCORE_BYTES", "jax.models.attention.CPU_SCORE_BYTES"),
        ("activations.jax_chunks.FEWEST_QUERIES", "jax.models.attention.FEWEST_QUERIES"),
        ("activations.jax_chunks.SCORE_BYTES", "jax.models.attention.SCORE_BYTES"),
        ("activations.kernels.CAPPED_QUERIES", "torch.models.capped_attention.QUERIES"),
        ("activations.kernels.EXPERT_ALIGNED", "torch.models.expert_matrices.ALIGNED"),
        ("activations.kernels.EXPERT_ROWS", "torch.models.expert_products.ROWS"),
        ("activations.torch_timeline.CAPPED", "torch.techniques.activations.fused_loss.CAPPED"),
        ("activations.torch_timeline.CHUNK_TOKENS", "torch.techniques.activations.fused_loss.CHUNK_TOKENS"),
        ("activations.torch_timeline.CPU_CAPPED", "torch.techniques.activations.fused_loss.CPU_CACHED"),
        ("state.data.AHEAD_BATCHES", "trainer.data.stream.AHEAD_BATCHES"),
        ("state.data.AHEAD_BYTES", "trainer.data.stream.AHEAD_BYTES"),
        ("state.data.HELD_BYTES", "trainer.tasks.regression.HELD_BYTES"),
        ("state.data.JOINED_BYTES", "trainer.data.text.portion.JOINED_BYTES"),
        ("state.data.UNSEEN_SHARE", "trainer.data.windows.split.UNSEEN_SHARE"),
        ("state.predicting.DEVICE_SLICE", "torch.jumps.DEVICE_SLICE"),
        ("state.predicting.HOST_SLICE", "jax.jumps.SLICE"),
        ("state.predicting.HOST_SLICE", "torch.jumps.CPU_SLICE"),
        ("state.saving.SHARD_BYTES", "trainer.weights.checkpoint.SHARD_BYTES"),
        ("state.sizes.QUANTIZED_FROM", "trainer.techniques.blockwise.SMALLEST"),
        ("state.sizes.STORAGE_BLOCK", "trainer.techniques.base_storage.BLOCK"),
    ],
)  # fmt: skip
def test_what_memory_counts_is_what_the_trainer_uses(counted: str, used: str) -> None:
    trainer = f"memconsole_{used}"
    pytest.importorskip(FRAMEWORKS[trainer.partition(".")[0]])
    found = pkgutil.resolve_name(f"memconsole.memory.{counted}")
    assert found == pkgutil.resolve_name(trainer)
