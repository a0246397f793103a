"""This machine's processor: its name, its clock, its instructions, and how many CPUs this process may use.

Without 16-bit instructions a CPU trains far slower in 16 bits than in fp32, and how much slower depends on the width of
its vectors.
"""

from __future__ import annotations

import os
import platform
from functools import lru_cache
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")
_X86: dict[str, tuple[str, str]] = {
    "bf16": ("avx512_bf16", "amx_bf16"),
    "fp16": ("avx512_fp16", "amx_fp16"),
}
_ARM = {"bf16": ("bf16", "svebf16"), "fp16": ("asimdhp", "fphp")}
"""The instruction sets for matmuls in 16 bits, as the system names them: on x86 first vectors, then the matrix unit."""
_NAMES = ("model name", "Hardware", "cpu model", "uarch")
"""Keys under which the systems tell the model name, the best one first."""


def name(cpuinfo: Path = _CPUINFO) -> str:
    """The model name, as the maker spells it; the architecture if the system does not tell it."""
    facts = _facts(cpuinfo)
    model_name = next((facts[key] for key in _NAMES if facts.get(key)), "")
    return model_name or platform.processor() or platform.machine() or "processor"


def flags(cpuinfo: Path = _CPUINFO) -> frozenset[str]:
    """The instruction sets; empty if the system does not tell them."""
    facts = _facts(cpuinfo)
    return frozenset(facts.get("flags", facts.get("Features", "")).split())


def megahertz(cpuinfo: Path = _CPUINFO) -> float | None:
    """The clock of the first CPU; None if the system does not tell it."""
    try:
        return float(_facts(cpuinfo)["cpu MHz"])
    except (KeyError, ValueError):
        return None


def process_cpus() -> int:
    """CPUs that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # only Linux has it
        return os.cpu_count() or 1


def missing_instructions(precision: str, cpuinfo: Path = _CPUINFO) -> str:
    """The missing instruction set that would make matmuls in `precision` fast. Empty if the processor has one, if none
    is needed, or if the system does not say (Linux does)."""
    known, present = _instructions(precision, cpuinfo)
    return known[0] if known and not present else ""


def slow_vectors(precision: str, cpuinfo: Path = _CPUINFO) -> bool:
    """Whether the processor's instructions for `precision` are vectors that train slower than fp32's: those of an Intel
    processor without a matrix unit (AMX). AMD's multiply twice as fast as in fp32 (`tests/bench/peers.py`)."""
    vectors_alone = {_X86.get(_width(precision), ("",))[0]}
    return _instructions(precision, cpuinfo)[1] == vectors_alone and not _is_amd(cpuinfo)


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
    return "flags" not in _facts(cpuinfo) or "avx512f" in flags(cpuinfo)


def prefers_onednn(cpuinfo: Path = _CPUINFO) -> bool:
    """Whether oneDNN multiplies fp32 matrices faster than MKL on this processor: on AMD's with AVX-512
    (`tests/bench/products.py`)."""
    return _is_amd(cpuinfo) and "avx512f" in flags(cpuinfo)


def has_512_bit_units(cpuinfo: Path = _CPUINFO) -> bool:
    """Whether this is an AMD processor whose vector units have 512 bits: Zen 5 (family 26). oneDNN uses them and MKL does
    not, so that oneDNN multiplies fp32 matrices about twice as fast (`tests/bench/products.py`). Zen 4 has units of 256."""
    family = _facts(cpuinfo).get("cpu family", "")
    return prefers_onednn(cpuinfo) and family.isdecimal() and int(family) >= 26


def _is_amd(cpuinfo: Path) -> bool:
    return _facts(cpuinfo).get("vendor_id") == "AuthenticAMD"


def _width(precision: str) -> str:
    """The number format in which matmuls of `precision` compute."""
    return precision.removesuffix("-sr")


def _instructions(precision: str, cpuinfo: Path) -> tuple[tuple[str, ...], frozenset[str]]:
    """The instruction sets for matmuls in `precision` (none if the system does not say), and those of them that the
    processor has."""
    width = _width(precision)
    if width not in _X86:
        return (), frozenset()
    facts = _facts(cpuinfo)
    if "flags" not in facts and "Features" not in facts:
        return (), frozenset()
    known = (_X86 if "flags" in facts else _ARM)[width]
    return known, flags(cpuinfo) & set(known)


def _facts(cpuinfo: Path) -> dict[str, str]:
    """What the system tells of the first CPU, by key; empty if it tells nothing."""
    try:
        text = cpuinfo.read_text(errors="replace")
    except OSError:
        return {}
    lines = (line.partition(":") for line in text.splitlines())
    first_values: dict[str, str] = {}
    for key, _, value in lines:
        first_values.setdefault(key.strip(), value.strip())
    return first_values
