"""Out-of-memory verdicts of XLA's compilers, as they were printed, become bytes."""

import pytest

from memconsole_jax.tracing.trace_verdict import is_out_of_memory, needed_bytes

GIB = 2**30
EARLY = (
    "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries "
    "(53.84G) exceeds available HBM (15.75G)."
)
ASSIGNED = (
    "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. "
    "Used 61.49G of 31.24G hbm. Exceeded hbm capacity by 30.25G.\n\n"
    "Total hbm usage >= 61.75G:\n    reserved        263.00M \n    program          61.49G \n"
    "    arguments            0B \n"
)
SHORT = "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 15.76G of 15.75G hbm."


@pytest.mark.parametrize(
    ("message", "gibibytes"),
    [(EARLY, 53.84), (ASSIGNED, 61.75 - 263 / 1024), (SHORT, 15.76)],
    ids=["early", "assigned", "short"],
)
def test_what_the_compiler_says_it_needs(message: str, gibibytes: float) -> None:
    assert is_out_of_memory(message)
    assert needed_bytes(message) == pytest.approx(gibibytes * GIB, rel=1e-4)


def test_another_error_is_no_verdict() -> None:
    assert not is_out_of_memory("INVALID_ARGUMENT: unknown layout")
    assert needed_bytes("RESOURCE_EXHAUSTED: Ran out of memory") is None
