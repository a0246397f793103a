"""Where a plan's first weights come from, in words, and why training must not start from them."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from memconsole.given_path import given_path
from memconsole.plan import catalog
from memconsole.plan.models.files import (
    TOKENIZER_JSON,
    TOKENIZERS,
    check_weights,
    has_weights,
    other_weights,
    tokenizer_file,
)
from memconsole.plan.models.finding import find_model
from memconsole.plan.models.recommender import Recommender, is_of_decoder
from memconsole.plan.plan import Plan, PlanError, printable, quote

RANDOM = "random"
"""The value of `model.weights` that asks for random weights."""
SCRATCH, FINE_TUNES, NOT_HERE = "from scratch", "fine-tunes", "weights not here"
OTHER_FORMAT = "weights in another format than safetensors"
FROM_RUN = "from the weights of run"


class Origin(msgspec.Struct, frozen=True):
    """Where the first weights come from."""

    words: str
    """One phrase that names the directory, its weights and the tokenizer."""
    directory: str | None = None
    """The directory whose weights are loaded; None if all weights are random."""


def checkpoint_of(plan: Plan) -> Path | None:
    """The checkpoint of another run that the plan starts from, if it names one."""
    named = plan.model.weights
    return None if named is None or named == RANDOM else given_path(named)


def origin(plan: Plan) -> Origin:
    """Where the plan's weights come from. Raises `PlanError` if the model is not found."""
    checkpoint = checkpoint_of(plan)
    if checkpoint is not None:
        run, step = checkpoint.parent.parent.name, checkpoint.name
        return Origin(f"{FROM_RUN} {printable(run)} ({printable(step)})")
    named = catalog.model_directory(plan)
    if named is None:
        return Origin(f"{SCRATCH}{_how_to_fine_tune(plan)}")
    if plan.model.weights == RANDOM:
        return Origin(f"{SCRATCH}: model.weights = {RANDOM}")
    name, directory = _weights_name(plan), Path(named)
    if not has_weights(directory):
        if others := other_weights(directory):
            return Origin(f"{OTHER_FORMAT}: {printable(named)} holds {printable(others[0])}")
        if _is_hub_id(name):
            return Origin(f"{NOT_HERE}: hf download {name}")
        return Origin(f"{SCRATCH}: {printable(named)} holds no weights")
    model = catalog.model(plan)
    loaded, not_loaded = list(model.parameters()), ""
    if isinstance(model, Recommender):
        loaded, not_loaded = [p for p in loaded if is_of_decoder(p)], "; the rest from scratch"
    count = sum(p.size for p in loaded)
    tokens = f", {_tokenizer_words(plan, directory)}" if _reads_text(plan) else ""
    return Origin(
        f"{FINE_TUNES} {printable(named)} ({count:,} parameters{tokens}){not_loaded}", named
    )


def shortly(plan: Plan) -> str:
    """Where the plan's weights come from in a few words, for a narrow place; empty if the model is not found."""
    try:
        named = catalog.model_directory(plan)
    except PlanError:
        return ""
    if checkpoint_of(plan) is not None:
        return FROM_RUN
    if named is None or plan.model.weights == RANDOM:
        return SCRATCH
    if has_weights(Path(named)):
        return FINE_TUNES
    if other_weights(Path(named)):
        return OTHER_FORMAT
    return NOT_HERE if _is_hub_id(_weights_name(plan)) else SCRATCH


def frozen_at_random(plan: Plan) -> str:
    """One sentence on weights that are frozen although they are random; empty if there are none. Without
    `model.weights = random`, `check_origin` refuses such a plan."""
    o = plan.optimize
    if plan.model.weights != RANDOM or not (o.freeze_base or o.lora_rank):
        return ""
    adapters = "optimize.lora_rank = 0 and " if o.lora_rank else ""
    return (
        f"the frozen weights are random: nothing was trained into them; set {adapters}"
        "optimize.freeze_base = false to train them"
    )


def refused_base(plan: Plan) -> str:
    """One sentence on a frozen base without trained weights, which `check_origin` refuses; empty if there is none."""
    o = plan.optimize
    if (
        not (o.freeze_base or o.lora_rank)
        or plan.model.weights == RANDOM
        or shortly(plan) != SCRATCH
    ):
        return ""
    what = "adapters on" if o.lora_rank else "a frozen base of"
    return (
        f"train refuses {what} random weights: name a directory or a hub id with weights as model.name; "
        f"model.weights = {RANDOM} trains them anyway, and little is learned"
    )


def check_origin(plan: Plan) -> None:
    """Raise `PlanError` if the plan can be priced, but its first weights are not what a person
    expects, or have no tokenizer."""
    checkpoint = checkpoint_of(plan)
    named = catalog.model_directory(plan)
    if checkpoint is not None:
        _check_own_tokenizer(plan, checkpoint, named)
        return
    start = origin(plan)
    if named is not None and plan.model.weights is None:
        check_weights(Path(named))
    if start.directory is None:
        _check_random(plan, start)
    elif _reads_text(plan) and plan.data.tokenizer is None:
        directory = Path(start.directory)
        if tokenizer_file(directory) is None:
            raise PlanError(
                f"model.name = {quote(plan.model.name)}: {directory} holds weights, but no "
                f"tokenizer: expected {TOKENIZERS}; put it there, or name one with data.tokenizer",
                "model.name",
            )


def _check_own_tokenizer(plan: Plan, checkpoint: Path, named: str | None) -> None:
    """Refuse to train a new tokenizer for the weights of a run."""
    model_has_one = named is not None and tokenizer_file(Path(named)) is not None
    if plan.data.tokenizer is None and not model_has_one and _reads_text(plan):
        run = checkpoint.parent.parent
        raise PlanError(
            f"model.weights = {quote(str(checkpoint))}: these weights know the tokens of their run's tokenizer; "
            f"add data.tokenizer = {quote(str(run / TOKENIZER_JSON))}, or use memconsole train --from "
            f"{printable(run.name)}",
            "model.weights",
        )


def _check_random(plan: Plan, start: Origin) -> None:
    """Refuse random weights where trained ones are expected, unless they are asked for by name."""
    if plan.model.weights == RANDOM:
        return
    ask = f"model.weights = {RANDOM} trains from random ones"
    key = "model.decoder" if isinstance(catalog.model(plan), Recommender) else "model.name"
    if catalog.model_directory(plan) is not None and _is_hub_id(_weights_name(plan)):
        raise PlanError(f"{key} = {quote(_weights_name(plan))}: {start.words}; {ask}", key)
    o = plan.optimize
    if plan.learns_pairs:
        raise PlanError(
            f"train.objective = {plan.train.objective}: preferences are learned by a trained model, and "
            f"{quote(_weights_name(plan))} starts {start.words}; name a directory or a hub id with weights as {key}, begin with the weights of a run "
            f"(memconsole train --from RUN), or ask for it: {ask}",
            "train.objective",
        )
    if o.lora_rank or o.freeze_base:
        frozen, value = ("lora_rank", o.lora_rank) if o.lora_rank else ("freeze_base", "true")
        raise PlanError(
            f"optimize.{frozen} = {value}: the frozen base would be random, because "
            f"{quote(_weights_name(plan))} starts {start.words}; name a directory or a hub id with "
            f"weights as {key}, or ask for it: {ask}",
            f"optimize.{frozen}",
        )


def _how_to_fine_tune(plan: Plan) -> str:
    """How to get trained weights for a catalog model, as the end of a sentence."""
    entry = catalog.models().get(plan.model.name)
    hub_id = entry.hub_id if entry is not None else None
    if hub_id is None or plan.model.weights == RANDOM:
        return ""
    try:
        directory = find_model(hub_id)
    except PlanError:
        directory = None
    if directory is not None and has_weights(Path(directory)):
        return f"; to fine-tune: model.name = {hub_id}"
    return f"; to fine-tune: hf download {hub_id}, then model.name = {hub_id}"


def _weights_name(plan: Plan) -> str:
    """The name of the model, or of a recommender's decoder, whose weights are looked for."""
    return plan.model.decoder or plan.model.name


def _is_hub_id(name: str) -> bool:
    """Whether the name of a model that was found is no directory."""
    return not os.path.isdir(given_path(name))


def _reads_text(plan: Plan) -> bool:
    """Whether the run needs a tokenizer: not for rows of token ids, nor for another task."""
    entry = catalog.models().get(plan.model.name)
    if entry is not None and entry.task != "language":
        return False
    return catalog.dataset(plan).format != "hdf5"


def _tokenizer_words(plan: Plan, directory: Path) -> str:
    if plan.data.tokenizer is not None:
        return f"tokenizer {printable(plan.data.tokenizer)}"
    file = tokenizer_file(directory)
    return "no tokenizer" if file is None else f"its {file.name}"
