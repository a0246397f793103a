"""The instructions of this machine's processor. Without 16-bit instructions a CPU trains far slower in 16 bits than in
fp32, and how much slower depends on the width of its vectors."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")
_X86 = {
    "bf16": ("avx512_bf16", "amx_bf16"),
    "fp16": ("avx512_fp16", "amx_fp16"),
}
_ARM = {"bf16": ("bf16", "svebf16"), "fp16": ("asimdhp", "fphp")}


def missing_instructions(precision: str, cpuinfo: Path = _CPUINFO) -> str:
    """The missing instruction set that would make matmuls in `precision` fast. Empty if the processor has one, if none
    is needed, or if the system does not say (Linux does)."""
    known, present = _instructions(precision, cpuinfo)
    return known[0] if known and not present else ""


def slow_vectors(precision: str, cpuinfo: Path = _CPUINFO) -> bool:
    """Whether the processor's instructions for `precision` are vectors that train slower than fp32's: those of an Intel
    processor without a matrix unit (AMX). AMD's multiply twice as fast as in fp32 (`tests/bench/peers.py`)."""
    vectors = {_X86.get(_width(precision), ("",))[0]}
    amd = "AuthenticAMD" in _features(cpuinfo).get("vendor_id", ())
    return _instructions(precision, cpuinfo)[1] == vectors and not amd


def slower_than_fp32(precision: str, backend: str, cpuinfo: Path = _CPUINFO) -> str:
    """Why training in `precision` takes longer than in fp32 on this machine's processor; empty if it does not."""
    if precision == "fp32":
        return ""
    if backend == "jax":
        return (
            "XLA on a CPU computes 16-bit types in fp32, so that training is no faster than in fp32"
        )
    if missing := missing_instructions(precision, cpuinfo):
        return f"this CPU has no {missing}, so that training is far slower than in fp32"
    if slow_vectors(precision, cpuinfo):
        return "this CPU has 16-bit vectors but no matrix unit (AMX), so that training is slower than in fp32"
    return ""


@lru_cache(maxsize=1)
def wide_vectors(cpuinfo: Path = _CPUINFO) -> bool:
    """Whether vectors have 512 bits. True if the system does not say."""
    found = _features(cpuinfo).get("flags")
    return found is None or "avx512f" in found


def prefers_onednn(cpuinfo: Path = _CPUINFO) -> bool:
    """Whether oneDNN multiplies fp32 matrices faster than MKL on this processor: on AMD's with AVX-512
    (`tests/bench/products.py`)."""
    found = _features(cpuinfo)
    return "AuthenticAMD" in found.get("vendor_id", ()) and "avx512f" in found.get("flags", ())


def _width(precision: str) -> str:
    return precision.removesuffix("-sr")


def _instructions(precision: str, cpuinfo: Path) -> tuple[tuple[str, ...], set[str]]:
    """The instruction sets for matmuls in `precision` (none if the system does not say), and those of them that the
    processor has."""
    width = _width(precision)
    if width not in _X86:
        return (), set()
    found = _features(cpuinfo)
    if "flags" in found:
        known, present = _X86[width], found["flags"]
    elif "Features" in found:
        known, present = _ARM[width], found["Features"]
    else:
        return (), set()
    return known, present & set(known)


def _features(cpuinfo: Path) -> dict[str, set[str]]:
    """The words listed for each key; empty if the system does not say."""
    try:
        text = cpuinfo.read_text(errors="replace")
    except OSError:
        return {}
    lines = (line.partition(":") for line in text.splitlines())
    return {key.strip(): set(value.split()) for key, _, value in lines}
