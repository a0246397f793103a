"""Speed and memory beside what people would use instead: nanoGPT and transformers' Trainer, on this machine's CPU.

    python tests/bench/peers.py [--quick] [--rounds N] [--only WORD] [--skip WORD]

nanoGPT is a checkout named by NANOGPT_DIR; its own train.py runs. The Trainer needs transformers and accelerate. A
peer that is not there is reported missing. Peer and memconsole take turns in each round, so that a machine that
slows down slows both. Shown are the medians, and the ratio memconsole / peer of each round: its median, least and most.
In a second table stands the share of the rate of a large matrix product, which each round measures too: the higher of
MKL's and oneDNN's. Results go to results/peers_amd.json or results/peers_intel.json, and into the tables of that maker
in docs/speed.md; those of another maker's processor are printed only.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.bench import peer_runs
from tests.bench.peer_runs import MissingError, Speed
from tests.bench.trained import MAKERS, into_page, machine, maker, markdown, results_of

RESULTS = results_of("peers", maker())
PAGE = ROOT / "docs" / "speed.md"
MIB = 2**20


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One piece of work that both do."""

    name: str
    peer: str
    """nanoGPT or Trainer."""
    shape: dict[str, Any]
    """The model's config.json."""
    rows: int
    length: int
    steps: int
    quick_steps: int
    bf16: bool = False
    parts: int = 1
    """Micro-batches in which memconsole takes the rows of a step. The peer takes them at once."""


def _gpt(width: int, layers: int, heads: int, length: int) -> dict[str, Any]:
    """nanoGPT computes exact GELU; GPT-2's own approximation takes longer on a CPU."""
    shape = {"n_embd": width, "n_layer": layers, "n_head": heads, "n_positions": length}
    vocabulary = {"vocab_size": peer_runs.CHARACTERS, "activation_function": "gelu"}
    return {"model_type": "gpt2", **vocabulary, **shape}


LLAMA = {
    "model_type": "llama",
    "vocab_size": 12_000,
    "hidden_size": 512,
    "intermediate_size": 1376,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
}
"""31.4 M parameters."""
EXPERTS = {
    "model_type": "qwen3_moe",
    "vocab_size": 8_000,
    "hidden_size": 384,
    "moe_intermediate_size": 384,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
"""34 M parameters, of which a token uses 13 M."""
CASES = (
    Case(name="GPT 0.8 M, 12 x 64 (nanoGPT's README run for a CPU)", peer="nanoGPT",
         shape=_gpt(128, 4, 4, 64), rows=12, length=64, steps=400, quick_steps=80),
    Case(name="GPT 10.7 M, 64 x 256", peer="nanoGPT", shape=_gpt(384, 6, 6, 256), rows=64,
         length=256, steps=8, quick_steps=4),
    Case(name="GPT 10.7 M, 64 x 256, memconsole in 4 micro-batches", peer="nanoGPT", shape=_gpt(384, 6, 6, 256),
         rows=64, length=256, steps=8, quick_steps=4, parts=4),
    Case(name="Llama 31 M, 8 x 512", peer="Trainer", shape=LLAMA, rows=8, length=512, steps=10,
         quick_steps=4),
    Case(name="Llama 31 M, 8 x 512, memconsole in 4 micro-batches", peer="Trainer", shape=LLAMA, rows=8,
         length=512, steps=10, quick_steps=4, parts=4),
    Case(name="Llama 31 M, 8 x 512, bf16", peer="Trainer", shape=LLAMA, rows=8, length=512,
         steps=10, quick_steps=4, bf16=True),
    Case(name="Qwen3 MoE 34 M, 4 of 16 experts, 8 x 512", peer="Trainer", shape=EXPERTS, rows=8,
         length=512, steps=10, quick_steps=4),
)  # fmt: skip
BACKENDS = ("torch", "jax")


def measured(case: Case, rounds: int, quick: bool) -> dict[str, Any]:
    """Each round's speeds of one case, by who ran it; a peer that is missing says why."""
    steps = case.quick_steps if quick else case.steps
    found: dict[str, list[Speed]] = {}
    rates: list[float] = []
    missing = ""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        work = peer_runs.prepare(place, case.shape, case.rows, case.length, steps, case.bf16)
        flops = peer_runs.flops_per_token(work)
        for _ in range(rounds):
            rates.append(peer_runs.product_rate())
            try:
                peer = peer_runs.PEERS[case.peer](work)
                found.setdefault(case.peer, []).append(peer)
            except MissingError as error:
                missing = str(error)
            for backend in BACKENDS:
                found.setdefault(backend, []).append(peer_runs.ours(work, backend, case.parts))
    runs = {who: [msgspec.to_builtins(one) for one in speeds] for who, speeds in found.items()}
    return {
        "peer": case.peer,
        "missing": missing,
        "steps": steps,
        "flops_per_token": flops,
        "product_rates": rates,
        "runs": runs,
    }


def table(results: dict[str, Any]) -> str:
    """A row for each case and backend."""
    rows = [
        [
            "work",
            "peer",
            "its tokens/s",
            "its MiB",
            "memconsole",
            "tokens/s",
            "ratio",
            "MiB",
            "ratio",
        ]
    ]
    for case in CASES:
        one = results.get(case.name)
        for backend in BACKENDS:
            rows.append([case.name, case.peer, *_cells(one, case.peer, backend)])
    return markdown(rows, left=2)


def shares(results: dict[str, Any]) -> str:
    """A row for each case in fp32: the part of the rate of a large product that its training reaches."""
    rows = [["work", "product, GFLOP/s", "peer", *BACKENDS]]
    for case in CASES:
        one = results.get(case.name, {})
        if case.bf16 or "product_rates" not in one:
            continue
        rates = one["product_rates"]
        cells = [f"{statistics.median(rates) / 1e9:,.0f}"]
        for who in (case.peer, *BACKENDS):
            runs = one["runs"].get(who, ())
            pairs = zip(runs, rates, strict=True) if runs else ()
            own = [run["tokens_per_second"] * one["flops_per_token"] / rate for run, rate in pairs]
            cells.append(f"{statistics.median(own):.0%}".replace("%", " %") if own else "missing")
        rows.append([case.name, *cells])
    return markdown(rows)


TABLES = {"peers": table, "peers-shares": shares}
"""The tables of the page, by their marks without the maker."""


def _cells(one: dict[str, Any] | None, peer: str, backend: str) -> list[str]:
    if one is None:
        return ["not measured", "", backend, "", "", "", ""]
    own, other = one["runs"][backend], one["runs"].get(peer, [])
    cells = []
    for key, unit in (("tokens_per_second", 1), ("peak_bytes", MIB)):
        mine = statistics.median(run[key] for run in own) / unit
        if not other:
            cells.append(("missing", f"{mine:,.0f}", ""))
            continue
        ratios = sorted(a[key] / b[key] for a, b in zip(own, other, strict=True))
        spread = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        its = statistics.median(run[key] for run in other) / unit
        cells.append((f"{its:,.0f}", f"{mine:,.0f}", spread))
    (speed, my_speed, faster), (memory, my_memory, leaner) = cells
    return [speed, memory, backend, my_speed, faster, my_memory, leaner]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="few steps, two rounds: some twenty minutes"
    )
    parser.add_argument("--rounds", type=int, help="turns of peer and memconsole (3; quick: 2)")
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    parser.add_argument("--skip", help="leave out cases whose name has this in it")
    options = parser.parse_args()
    rounds = options.rounds or (2 if options.quick else 3)
    results = json.loads(RESULTS.read_text())["results"] if RESULTS.exists() else {}
    for case in CASES:
        if options.only not in case.name or (options.skip and options.skip in case.name):
            continue
        print(f"measuring {case.name}", file=sys.stderr)
        found = measured(case, rounds, options.quick)
        results[case.name] = found
        document = {"command": "python tests/bench/peers.py", **machine(), "results": results}
        RESULTS.write_text(json.dumps(document, indent=1) + "\n")
        if found["missing"]:
            print(f"{case.peer} is missing: {found['missing']}", file=sys.stderr)
    for mark, made in TABLES.items():
        print(made(results), end="\n\n")
        if maker() in MAKERS:
            into_page(PAGE, f"{mark}-{maker()}", made(results))


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
