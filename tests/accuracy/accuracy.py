"""`make accuracy`: every estimate against every truth that can be asked here, as one table, in docs/estimates.md too.

    python tests/accuracy/accuracy.py [PART ...]     all parts, or those named
    python tests/accuracy/accuracy.py --print        the table of what is stored, measuring nothing

A part whose truth is not at hand here (no card, a package that is not installed) says so; what was measured
of it elsewhere stays in results/, with its machine, versions and date.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.accuracy.results import UNAVAILABLE, into_page, stored, table

PARTS = {
    "block-programs": "block_programs.py",
    "torch-formula": "torch_formula.py",
    "torch-experts": "torch_formula.py --experts",
    "torch-tiled": "torch_formula.py --tiled",
    "torch-sharded": "torch_sharded.py",
    "torch-exact": "torch_exact.py",
    "torch-reserved": "torch_reserved.py",
    "xla": "xla.py",
    "jax-sharded": "jax_sharded.py",
    "cpu": "cpu.py",
    "cpu-exact": "cpu_exact.py",
    "speed": "speed.py",
    "systems": "systems.py",
    "hybrid": "hybrid.py",
    "key-press": "key_press.py",
    "gpu": "gpu.py",
    "bands": "bands.py",
}
"""Scripts by the name of the file that they write; each runs alone and takes some minutes at most. The first
compares the stored programs of torch's blocks with a new trace, and writes no results. Neither does the last: it makes
of them all how wide the bands of exact numbers are."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", nargs="*", help=f"{' | '.join(PARTS)}")
    parser.add_argument("--print", action="store_true", help="the stored table only")
    options = parser.parse_args()
    unknown = [name for name in options.part if name not in PARTS]
    if unknown:
        parser.error(f"no part {unknown[0]}; there are {', '.join(PARTS)}")
    failed = [] if options.print else [n for n in options.part or PARTS if not _measure(n)]
    parts = stored()
    print(table(parts))
    if not options.print:
        into_page(parts)
    missed = [row.estimate for part in parts for row in part.rows if not row.met]
    if missed:
        print(f"\nbars missed: {', '.join(missed)}")
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def _measure(name: str) -> bool:
    """Run one part; False where it failed."""
    print(f"== {name}", flush=True)
    start = time.monotonic()
    script, *options = PARTS[name].split()
    command = [sys.executable, str(Path(__file__).with_name(script)), *options]
    done = subprocess.run(command, cwd=ROOT, check=False)
    print(f"   {time.monotonic() - start:.0f} seconds", flush=True)
    return done.returncode in (0, UNAVAILABLE)


if __name__ == "__main__":
    main()
