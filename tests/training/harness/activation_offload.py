"""Settings with which activations move off the device."""

from __future__ import annotations

KEY = "optimize.activation_offload"
FULL = {"optimize.gradient_checkpointing": "full"}
STEPS = 4
EVERYTHING = FULL | {
    "optimize.precision": "bf16",
    "optimize.fused_loss": True,
    "optimize.accumulation_steps": 2,
    "optimize.optimizer": "adamw-8bit",
    "optimize.optimizer_offload": "pinned",
    "train.batch_size": 2,
}
