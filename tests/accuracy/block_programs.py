"""The stored programs of torch's blocks against a trace of the modules as they are.

    python tests/accuracy/block_programs.py [--write] [STRUCTURE ...]

Needs torch, no accelerator: the trace runs on fake tensors. `--write` stores what the trace finds. Run it so after a
change of the decoder, its techniques or the tracer.
"""

from __future__ import annotations

import argparse
import gzip
import importlib.util
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import msgspec

from memconsole.memory.activations import block_programs
from memconsole.memory.activations.kernels import Kernels, Mask, Part, program_name, structure
from memconsole.plan import catalog
from memconsole.plan.models.architecture import Architecture
from memconsole.plan.plan import Checkpointing
from tests.accuracy.results import unavailable

FOLDER = Path(block_programs.__file__).with_name("programs")
CHECKPOINTING: tuple[Checkpointing, ...] = ("none", "selective", "attention", "full")
MASKS: tuple[Mask, ...] = ("", "window", "documents", "padded")
PRECISIONS = {"fp32": (4, False, False), "bf16": (2, False, False)}
ROUNDED = {"bf16-sr": (2, True, False), "bf16-sr-summed": (2, True, True)}


def structures() -> dict[str, Architecture]:
    """An architecture of each structure that the catalog's families can have: with shared keys and without, parallel
    blocks also one after the other, shares of experts with and without their sum as a divisor, and GLM-4 with and without
    biases."""
    found = {}
    for entry in catalog.models().values():
        a = entry.architecture
        if a is None:
            continue
        grouped = {"gpt2": (1,), "gpt_neox": (1,), "starcoder2": (2,)}.get(a.family, (1, 2))
        parallels = {a.parallel_residual, False}
        normalized = {a.experts > 0, False}
        biased = {a.projection_biases, a.projection_biases and a.family != "glm"}
        for groups, parallel, divided, biases in product(grouped, parallels, normalized, biased):
            one = msgspec.structs.replace(
                a,
                heads=2,
                kv_heads=2 // groups,
                parallel_residual=parallel,
                normalized_shares=divided,
                projection_biases=biases,
            )
            found[structure(one)] = one
    return found


def kernels(a: Architecture) -> dict[str, tuple[Part, Kernels]]:
    """Every program of an architecture's structure, by name."""
    found: dict[str, tuple[Part, Kernels]] = {}
    for k in _blocks(a):
        parts: list[Part] = ["block"]
        if k.checkpointing == "none" and not (k.first or k.dropped):
            parts.append("evaluated block")
            if not (k.mask or k.rounded or k.rank or k.tile):
                parts += [] if k.single_experts else ["norm", "evaluated norm"]
        for part in parts:
            found.setdefault(program_name(part, k), (part, k))
    return found


def _blocks(a: Architecture) -> Iterator[Kernels]:
    for k in _plain_blocks():
        yield k
        if not a.experts and k.checkpointing != "selective":
            yield msgspec.structs.replace(k, tile=1)
        if a.experts and k.kind == "gpu" and k.compute == 2:
            yield msgspec.structs.replace(k, single_experts=True)


def _plain_blocks() -> Iterator[Kernels]:
    for kind, checkpointing, mask, dropped in product(
        ("cpu", "gpu", "apple"), CHECKPOINTING, MASKS, (False, True)
    ):
        if mask == "padded" and kind != "gpu":
            continue
        for compute, rounded, summed in (PRECISIONS | ROUNDED).values():
            yield Kernels(
                compute=compute,
                kind=kind,
                checkpointing=checkpointing,
                mask=mask,
                dropped=dropped,
                rounded=rounded,
                summed=summed,
            )
        for compute, base, first in product((4, 2), ("", "none", "int8", "nf4"), (False, True)):
            yield Kernels(
                compute=compute,
                kind=kind,
                checkpointing=checkpointing,
                mask=mask,
                dropped=dropped,
                rank=1 if base else 0,
                frozen=True,
                storage=base or "none",
                first=first,
            )


def traced(name: str) -> block_programs.StructurePrograms:
    """The programs of a structure from a trace."""
    import torch

    from tests.accuracy.block_moments import packed, traced_program
    from tests.accuracy.trace_block import BlockTracer

    torch.set_num_threads(1)
    tracer, a = BlockTracer(), structures()[name]
    found = kernels(a).items()
    return packed({key: traced_program(tracer, a, k, part) for key, (part, k) in found})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("structure", nargs="*", help="all without any")
    parser.add_argument("--write", action="store_true", help="store the programs")
    options = parser.parse_args()
    known = sorted(structures())
    if unknown := [name for name in options.structure if name not in known]:
        parser.error(f"no structure {unknown[0]}; there are {', '.join(known)}")
    if importlib.util.find_spec("torch") is None:
        unavailable('torch is not installed: pip install "memconsole[torch]"')
    os.environ["OMP_NUM_THREADS"] = "1"
    start, names = time.monotonic(), options.structure or known
    other = []
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as workers:
        for name, found in zip(names, workers.map(traced, names), strict=True):
            if options.write:
                data = gzip.compress(msgspec.json.encode(found), mtime=0)
                FOLDER.joinpath(f"{name}.json.gz").write_bytes(data)
            elif found != block_programs.structure_programs(name):
                other.append(name)
            print(f"{time.monotonic() - start:5.0f} s  {len(found.programs)} programs of {name}")
    if other:
        sys.exit(
            f"stored programs differ from the trace (store it with --write): {', '.join(other)}"
        )


if __name__ == "__main__":
    main()
