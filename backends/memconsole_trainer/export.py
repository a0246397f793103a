"""``memconsole_trainer.command export RUN_DIR OUT [bitnet|peft]``: export a run's weights to a Hugging
Face directory, or those of a recommender or a regressor with a program that computes with them."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from memconsole.plan.plan import PlanError
from memconsole.plan.tasks import task_of_model
from memconsole_trainer.new_files import new_folder
from memconsole_trainer.predictions.export import export_model
from memconsole_trainer.weights import trained
from memconsole_trainer.weights.bitnet_accuracy import export_bitnet
from memconsole_trainer.weights.export import DTYPES
from memconsole_trainer.weights.export_run import adapter_notes, export_adapters, export_run
from memconsole_trainer.weights.tokenizer_export import generation_notes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("form", nargs="?", choices=["bitnet", "peft"])
    parser.add_argument("--checkpoint", default=trained.BEST_OR_LAST)
    parser.add_argument("--dtype", choices=DTYPES)
    options = parser.parse_args()
    try:
        trained_model = trained.read(options.run, options.checkpoint)
        trained_model.check_base()
        with new_folder(options.out) as out:
            lines = _written(trained_model, out, options.form, options.dtype)
            names = sorted(path.name for path in out.iterdir())
        if trained_model.tokenizer_file.is_file():
            lines += generation_notes(trained_model.plan)
    except (PlanError, ValueError, OSError) as error:
        print(f"memconsole: {error}", file=sys.stderr)
        return 2
    print(f"step {trained_model.checkpoint.step:,}{trained_model.note}: {', '.join(names)}")
    for line in lines:
        print(f"  {line}")
    return 0


def _written(
    trained_model: trained.TrainedModel, out: Path, form: str | None, dtype: str | None
) -> list[str]:
    """Write the files of an export to the folder `out`. Returns remarks for the user."""
    if task_of_model(trained_model.model).name != "language":
        if form is not None:
            raise PlanError(f"--format {form}: is for runs that learned language")
        return export_model(trained_model, out, dtype)
    if form == "bitnet":
        if dtype is not None:
            raise PlanError(
                f"--dtype {dtype}: --format bitnet stores codes, and the rest in float32"
            )
        if any(p.role == "experts" for p in trained_model.model.parameters()):
            raise PlanError("--format bitnet: there are no codes for models with experts")
        return export_bitnet(trained_model, out)
    if form == "peft":
        export_adapters(trained_model, out, dtype)
        return adapter_notes(trained_model.plan)
    return export_run(trained_model, out, dtype)
