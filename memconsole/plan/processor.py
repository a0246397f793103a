"""Which 16-bit instructions this machine's processor has; a CPU without them trains far slower in 16 bits than in 32."""

from __future__ import annotations

from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")
_X86 = {
    "bf16": ("avx512_bf16", "amx_bf16"),
    "fp16": ("avx512_fp16", "amx_fp16"),
}
_ARM = {"bf16": ("bf16", "svebf16"), "fp16": ("asimdhp", "fphp")}


def missing_instructions(precision: str, cpuinfo: Path = _CPUINFO) -> str:
    """The instruction set that would make matmuls in `precision` fast and is not there; empty if one is, if none is
    needed, or where the system does not say (it does on Linux)."""
    width = precision.removesuffix("-sr")
    if width not in _X86:
        return ""
    try:
        text = cpuinfo.read_text(errors="replace")
    except OSError:
        return ""
    lines = (line.partition(":") for line in text.splitlines())
    found = {key.strip(): set(value.split()) for key, _, value in lines}
    if "flags" in found:
        known, present = _X86[width], found["flags"]
    elif "Features" in found:
        known, present = _ARM[width], found["Features"]
    else:
        return ""
    return "" if present & set(known) else known[0]
