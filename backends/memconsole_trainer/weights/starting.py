"""The initial weights of a plan: from the model's directory, or random."""

from __future__ import annotations

import shlex
from pathlib import Path

from memconsole.plan import catalog
from memconsole.plan.architecture import Architecture
from memconsole.plan.model import Model
from memconsole.plan.plan import Plan, PlanError
from memconsole_trainer.engine import WeightSource
from memconsole_trainer.weights.huggingface import HuggingFaceWeights, has_weights
from memconsole_trainer.weights.initialize import InitialWeights

OTHER_FORMATS = (
    "pytorch_model*.bin",
    "model*.bin",
    "*.ckpt",
    "consolidated*.pth",
    "*.gguf",
    "tf_model*.h5",
    "flax_model*.msgpack",
)
"""Weights in files that are not read. Most of them are pickles, which can run any code."""


def weights_directory(plan: Plan) -> Path | None:
    """The directory of the plan's model, if it has one."""
    found = catalog.model_directory(plan)
    return Path(found) if found else None


def starting_weights(plan: Plan, model: Model) -> WeightSource:
    """The weights in the model's directory if it has any, else random ones from the plan's seed.

    Raises `WeightsError`.
    """
    directory = weights_directory(plan)
    if directory is not None and has_weights(directory):
        assert isinstance(model, Architecture)
        return HuggingFaceWeights(directory, model)
    return InitialWeights(model, plan.train.seed)


def check_format(directory: Path) -> None:
    """Raise `PlanError` if `directory` holds weights, but none that can be read."""
    if has_weights(directory):
        return
    names = sorted(path.name for form in OTHER_FORMATS for path in directory.glob(form))
    if names:
        raise PlanError(
            f"{directory} holds its weights as {names[0]}; only safetensors are read. Convert them "
            f"with transformers: {conversion(directory)}",
            "model.name",
        )


def conversion(directory: Path) -> str:
    """The command that writes the weights of `directory` there as safetensors."""
    program = (
        "import sys, transformers as t; d = sys.argv[1]; "
        "t.AutoModelForCausalLM.from_pretrained(d, dtype='auto').save_pretrained(d)"
    )
    return f'python -c "{program}" {shlex.quote(str(directory))}'
