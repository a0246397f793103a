"""Measures how BitNet b1.58 codes change the validation loss of a run, in the run's backend."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from memconsole.plan.plan import PlanError, replace
from memconsole.plan.toggles.optimizations import only_evaluating
from memconsole_trainer.backends import engine_factory
from memconsole_trainer.data.sources.documents import DataError
from memconsole_trainer.data.stream import BatchShape
from memconsole_trainer.data.text.opened import open_text
from memconsole_trainer.data.text.prepared import held_out
from memconsole_trainer.data.text.rows.validation import Validation
from memconsole_trainer.engine import LossSum, WeightSource
from memconsole_trainer.weights.bitnet import BitNetWeights, Packing, config
from memconsole_trainer.weights.export_run import export_run
from memconsole_trainer.weights.trained import TrainedModel

REPORT = "bitnet.json"


class NotMeasuredError(ValueError):
    """There is no data to measure on. The message says why."""


def export_bitnet(trained_model: TrainedModel, out: Path) -> list[str]:
    """Export the trained weights to `out` with `bitnet.json`, and return lines about size and
    accuracy.

    Raises what `export_run` raises.
    """
    packing = Packing(trained_model.architecture)
    readable = config(trained_model.architecture)
    export_run(trained_model, out, "float32", change=packing, more=readable)
    size = sum(path.stat().st_size for path in out.glob("*.safetensors"))
    document: dict[str, Any] = {
        "step": trained_model.checkpoint.step,
        "averaged": trained_model.averaged,
        "ternary_weights": packing.codes,
        "zero_share": packing.zeros / max(packing.codes, 1),
        "bytes": size,
        "fp32_bytes": _whole_bytes(trained_model),
        "validation": None,
    }
    lines = [
        f"{packing.codes:,} weights in 2 bits, {document['zero_share']:.0%} of them zero; the rest in fp32",
        f"size: {size / 2**20:.2f} MiB instead of {document['fp32_bytes'] / 2**20:.2f} MiB in fp32",
    ]
    if not readable:
        lines.append(
            "transformers cannot read this model in this format; memconsole_trainer.weights.bitnet describes it"
        )
    try:
        document["validation"] = compared(
            trained_model, BitNetWeights(out, trained_model.architecture)
        )
        lines += _lines(document["validation"])
    except (NotMeasuredError, DataError, PlanError) as error:
        lines.append(f"accuracy: not measured: {error}")
    (out / REPORT).write_text(json.dumps(document, indent=2) + "\n")
    return lines


def compared(trained_model: TrainedModel, quantized: WeightSource) -> dict[str, Any]:
    """Validation loss of the trained weights and of `quantized`. Raises `NotMeasuredError`,
    `DataError`, `PlanError`."""
    plan = trained_model.plan
    if plan.learns_pairs:
        raise NotMeasuredError(f"the run learned preferences ({plan.objective_name}), not texts")
    opened = open_text(plan, trained_model.architecture.vocab_size)
    if opened.fingerprint != trained_model.checkpoint.fingerprints.get("data"):
        raise NotMeasuredError(f"{plan.data.source} has changed since the run")
    tokenizer = trained_model.tokenizer() if trained_model.tokenizer_file.is_file() else None
    validation = held_out(plan, trained_model.architecture, opened, tokenizer)
    if not len(validation):
        raise NotMeasuredError("the run has no held-out data")
    shape = BatchShape(1, plan.evaluation_batch, plan.data.sequence_length)
    limit = plan.evaluation_batches(plan.train.evaluation_batches)
    covered = validation.target_bytes(shape, limit)
    sums = [
        _evaluated(trained_model, weights, validation, shape)
        for weights in (trained_model, quantized)
    ]
    document: dict[str, Any] = {"tokens": int(sums[0].weight), "text_bytes": covered}
    for name, total in zip(("before", "after"), sums, strict=True):
        loss = total.mean
        document[name] = {
            "loss": loss,
            "perplexity": math.exp(loss) if loss < 700 else None,
            "bits_per_byte": total.loss / math.log(2) / covered if covered else None,
        }
    return document


def _evaluated(
    trained_model: TrainedModel, weights: WeightSource, validation: Validation, shape: BatchShape
) -> LossSum:
    plan = replace(only_evaluating(trained_model.plan), {"train.ema_decay": 0.0})
    engine = engine_factory(plan.backend)(plan, None)
    engine.build(plan, trained_model.architecture, 1, weights)
    limit = plan.evaluation_batches(plan.train.evaluation_batches)
    return engine.evaluate(validation.batches(shape, limit))


def _lines(measured: dict[str, Any]) -> list[str]:
    words = []
    for name in ("before", "after"):
        m = measured[name]
        perplexity = "over 1e300" if m["perplexity"] is None else f"{m['perplexity']:,.2f}"
        bits = "" if m["bits_per_byte"] is None else f", {m['bits_per_byte']:.4f} bits/byte"
        words.append(f"{name}: validation loss {m['loss']:.4f}, perplexity {perplexity}{bits}")
    return [*words, f"over {measured['tokens']:,} held-out tokens, activations not rounded"]


def _whole_bytes(trained_model: TrainedModel) -> int:
    """Bytes of the same tensors in fp32."""
    from memconsole_trainer.weights.huggingface import exported

    return sum(4 * array.size for _, array in exported(trained_model.architecture, trained_model))
