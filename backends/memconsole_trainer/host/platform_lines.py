"""What a run's log says first of the machine's processor and of the optimizations that are on, for a person."""

from __future__ import annotations

import platform
from pathlib import Path

from memconsole.plan.plan import Plan

_KEPT = {
    "full": "block inputs only",
    "attention": "block inputs and attention outputs",
    "selective": "matmul and attention outputs",
}


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's own name, or at least its kind."""
    try:
        for text in cpuinfo.read_text(errors="replace").splitlines():
            key, _, value = text.partition(":")
            if key.strip() == "model name":
                return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def optimization_lines(plan: Plan, kind: str) -> list[str]:
    """Which optimizations of `plan` are on, on a `kind` of device, a line each; precision and compiling are the
    backend's to tell."""
    o, t = plan.optimize, plan.train
    shared = kind in ("cpu", "apple")
    lines = []
    if o.gradient_checkpointing != "none":
        kept = _KEPT[o.gradient_checkpointing]
        lines.append(f"Gradient checkpointing (remat) enabled - keeps {kept}")
    if o.accumulation_steps > 1:
        lines.append(
            f"Gradient accumulation: {o.accumulation_steps} steps (effective batch {plan.effective_batch})"
        )
    if o.activation_offload:
        where = "on disk" if shared else "in pinned host memory"
        lines.append(f"Activation offload: what blocks keep waits {where}")
    if o.fused_loss:
        lines.append("Chunked cross-entropy enabled - the full logits never exist")
    if o.lora_rank:
        lines.append(f"LoRA adapters of rank {o.lora_rank} on a frozen base")
    if o.base_storage != "bf16":
        lines.append(f"Frozen matrices stored in {o.base_storage} codes (QLoRA)")
    lines.append(f"Optimizer: {o.optimizer}{_stepping(plan, shared)}")
    if t.deterministic:
        lines.append(
            "Deterministic: the same bits from the same seed; on a GPU some kernels are slower"
        )
    if t.ema_decay:
        lines.append(
            f"Average of the trained weights (EMA, decay {t.ema_decay:g}): evaluated, sampled and exported in their place"
        )
    return lines


def _stepping(plan: Plan, shared: bool) -> str:
    o = plan.optimize
    where = ", stepped inside the backward pass" if o.optimizer_in_backward else ""
    if o.optimizer_offload != "none":
        narrow = " in 16 bits" if o.optimizer_offload == "compressed" else ""
        same = " as everything else" if shared else ""
        where += f", its state{narrow} in host memory{same}"
    return where
