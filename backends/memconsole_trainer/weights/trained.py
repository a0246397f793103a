"""Sources of weights: those that a run has trained so far, and those that a plan's training starts from."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from memconsole.plan import catalog
from memconsole.plan.models.architecture import Architecture
from memconsole.plan.models.files import TOKENIZER_JSON, has_weights
from memconsole.plan.models.model import Model
from memconsole.plan.models.recommender import Recommender, is_of_decoder
from memconsole.plan.models.regressor import Regressor
from memconsole.plan.plan import Plan, PlanError, replace
from memconsole.plan.tasks import task_of_model
from memconsole.plan.training.origin import RANDOM, checkpoint_of
from memconsole.plan.training.resuming import without_lost_source
from memconsole.plan.training.trained import frozen_names
from memconsole.runs.record.checkpoints import base
from memconsole.runs.record.checkpoints.manifest import step_of, verify
from memconsole.runs.record.directory import RunDirectory
from memconsole_trainer.backends import engine_factory
from memconsole_trainer.data.sources.documents import DataError
from memconsole_trainer.data.text.tokens.tokenizer import Tokenizer, file_fingerprint, load
from memconsole_trainer.engine import Engine, WeightsError, WeightSource
from memconsole_trainer.techniques.adapters import FINGERPRINT, Fingerprinted, Merged, check_base
from memconsole_trainer.techniques.average import PREFIX, is_averaged
from memconsole_trainer.weights.checkpoint import Checkpoints
from memconsole_trainer.weights.huggingface import HuggingFaceWeights
from memconsole_trainer.weights.initialize import InitialWeights
from memconsole_trainer.weights.loaded_checkpoint import LoadedCheckpoint
from memconsole_trainer.weights.starting import weights_directory

BEST_OR_LAST = "best-or-last"
CHOOSING_ATTEMPTS = 5
"""How often another checkpoint is chosen if the run deletes the chosen one while it is read."""


class NothingTrainedError(ValueError):
    """A run has no intact checkpoint, or no tokenizer. The message is one line."""


@dataclass(frozen=True)
class TrainedModel:
    """A run's plan, model and checkpoint. Implements `WeightSource`."""

    plan: Plan
    model: Model
    checkpoint: LoadedCheckpoint
    tokenizer_file: Path

    @property
    def architecture(self) -> Architecture:
        """The model of a run that learned language. Raises `PlanError` for one of another task."""
        if not isinstance(self.model, Architecture):
            raise PlanError(
                f"the run learned {task_of_model(self.model).name}; only language models write text: "
                "use memconsole predict"
            )
        return self.model

    @property
    def directory(self) -> Path:
        """The run's directory."""
        return self.checkpoint.path.parents[1]

    @property
    def adapted(self) -> bool:
        """Whether the checkpoint lacks the frozen base, which is stored elsewhere."""
        return bool(frozen_names(self.plan, self.model))

    @property
    def averaged(self) -> bool:
        """Whether the moving average of the weights is used as the trained model."""
        return is_averaged(self.plan)

    @property
    def note(self) -> str:
        """Text after the step's number that says if the weights are an average."""
        decay = self.plan.train.ema_decay
        return f", average of the weights (EMA, decay {decay:g})" if self.averaged else ""

    def tensor(self, name: str) -> NDArray[np.generic]:
        """The tensor of a canonical parameter name after training, with adapters merged."""
        if not self.adapted:
            return self.trained(name)
        return Merged(self.plan, self.model, self._base, self.trained).tensor(name)

    def check_base(self) -> None:
        """Raise `WeightsError` if the frozen base has changed since training."""
        if self.adapted:
            names = frozen_names(self.plan, self.model)
            base = Fingerprinted(self._base, names)
            for name in names:
                base.tensor(name)
            check_base(base.fingerprint(), self.checkpoint.tensor(FINGERPRINT))

    def engine(self) -> Engine:
        """An engine with the trained weights on one device of the plan. `optimize.compile` is off:
        it only speeds up training, and not every device or machine supports it. Raises `PlanError`, `WeightsError`."""
        alone = {"device.count": 1, "optimize.sharding": "none", "optimize.compile": False}
        plan = replace(self.plan, alone)
        try:
            engine = engine_factory(plan.backend)(plan, None)
        except PlanError as error:
            if error.key != "device.name":
                raise
            raise PlanError(f"{error}; --device cpu computes on the CPU", error.key) from None
        dataclasses.replace(self, plan=plan).build(engine)
        return engine

    def build(self, engine: Engine) -> None:
        """Build `engine` with the trained weights, with adapters and average as in training."""
        start: WeightSource = self._base if self.adapted else self
        engine.build(self.plan, self.model, 1, start)
        if self.adapted or self.averaged:
            engine.load_state(self.checkpoint)

    @functools.cached_property
    def _names(self) -> frozenset[str]:
        return frozenset(self.checkpoint.names())

    @functools.cached_property
    def _base(self) -> WeightSource:
        return starting_weights(self.plan, self.model)

    def trained(self, name: str) -> NDArray[np.generic]:
        """A trained tensor of the checkpoint, without the frozen weight that it is added to."""
        if self.averaged and f"{PREFIX}{name}" in self._names:
            return self.checkpoint.tensor(f"{PREFIX}{name}")
        return self.checkpoint.tensor(f"model.{name}")

    def tokenizer(self) -> Tokenizer:
        """The tokenizer the run trained with. Raises `NothingTrainedError` if there is none, and
        `PlanError` for another task than language."""
        vocabulary = self.architecture.vocab_size
        if not self.tokenizer_file.is_file():
            raise NothingTrainedError("the run trained on rows of tokens, without a tokenizer")
        return load(self.tokenizer_file, vocabulary)


def read(path: Path, which: str = "last", device: str | None = None) -> TrainedModel:
    """Read the model of the checkpoint "last", "best" or "step-N" of the run at `path`; of
    "best-or-last" the last one if none was evaluated. `device` stands for the plan's `device.name`.
    Raises `NothingTrainedError`, `PlanError`, `ValueError`."""
    run = RunDirectory(path)
    plan = without_lost_source(base.present(run, run.read_plan()), path / TOKENIZER_JSON)
    if device is not None:
        plan = replace(plan, {"device.name": device})
    stored = choose(Checkpoints(run.checkpoints_path, plan.train.keep_checkpoints), which)
    if stored is None:
        raise NothingTrainedError(f"{run.id} has no intact checkpoint yet")
    tokenizer = path / TOKENIZER_JSON
    known = stored.fingerprints.get("tokenizer")
    if known and tokenizer.is_file() and file_fingerprint(tokenizer) != known:
        print(
            f"warning: {tokenizer} is not the tokenizer that {run.id} was trained with: its text "
            "will be wrong; put the right one in its place",
            file=sys.stderr,
        )
    model = catalog.model(plan)
    own: Model = model
    if isinstance(model, (Architecture, Regressor)):
        # The folder or the data file that describes the model may be another one now.
        with contextlib.suppress(DataError):  # a model of another task: the caller says which
            own = stored.part("architecture", type(model))
    if own != model and isinstance(model, Architecture):
        print(
            f"warning: {plan.model.name} describes another model than when {run.id} was trained; the model of the checkpoint is used",
            file=sys.stderr,
        )
    return TrainedModel(plan, own, stored, tokenizer)


def choose(checkpoints: Checkpoints, which: str) -> LoadedCheckpoint | None:
    """The checkpoint that `which` names, as in `read`; None if the run has none.

    A run that trains may delete the chosen one while it is verified: then another is chosen, a few times.
    Raises `NothingTrainedError`.
    """
    for _ in range(CHOOSING_ATTEMPTS):
        with contextlib.suppress(FileNotFoundError):
            return _find(checkpoints, which)
    raise NothingTrainedError(
        f"the run trains, and deleted {CHOOSING_ATTEMPTS} checkpoints in a row while they were read: try again, or pause "
        "it first (memconsole pause)"
    )


def _find(checkpoints: Checkpoints, which: str) -> LoadedCheckpoint | None:
    """Raises `NothingTrainedError`, and `FileNotFoundError` if the checkpoint was deleted meanwhile."""
    committed, number = checkpoints.committed(), which.removeprefix("step-")
    if which in ("best", BEST_OR_LAST):
        path = checkpoints.best()
        if path is None and checkpoints.committed() != committed:
            raise FileNotFoundError("the best checkpoint was deleted while it was looked for")
    else:
        same = (p for p in committed if number.isdecimal() and step_of(p) == int(number))
        path = next(same, None)
    if which == "last" or (which == BEST_OR_LAST and path is None):
        return checkpoints.newest(
            lambda warning: print(f"warning: {warning}", file=sys.stderr),
            lambda: None,
            owned=False,
        )
    if path is None and committed:
        names = ["last", *(["best"] if checkpoints.best() is not None else [])]
        kept = ", ".join([*names, *(f"step-{step_of(p)}" for p in reversed(committed))])
        why = "none was saved right after an evaluation" if which == "best" else "it is not kept"
        raise NothingTrainedError(f"checkpoint {which}: {why}; there are {kept}")
    if path is None:
        return None
    problem = verify(path)
    if problem is not None:
        path.stat()
        raise NothingTrainedError(f"{path.name} is damaged ({problem})")
    return LoadedCheckpoint(path, keep_open=True)


def starting_weights(plan: Plan, model: Model) -> WeightSource:
    """The weights of the run's checkpoint that the plan names, those in the model's directory if it
    has any, else random ones from the plan's seed.

    Raises `WeightsError`.
    """
    checkpoint = checkpoint_of(plan)
    if checkpoint is not None:
        return _weights_of_run(checkpoint, model)
    directory = weights_directory(plan)
    new = InitialWeights(model, plan.train.seed)
    if directory is None or plan.model.weights == RANDOM or not has_weights(directory):
        return new
    if isinstance(model, Recommender):
        return _RecommenderWeights(model, HuggingFaceWeights(directory, model.decoder), new)
    assert isinstance(model, Architecture)
    return HuggingFaceWeights(directory, model)


def _weights_of_run(checkpoint: Path, model: Model) -> TrainedModel:
    """The weights that another run has trained. Raises `WeightsError` if its model is different or it no longer exists."""
    path = checkpoint.resolve()  # "best" is a link to the checkpoint of a step
    try:
        trained = read(path.parents[1], f"step-{step_of(path)}")
    except NothingTrainedError as error:
        raise WeightsError(f"model.weights = {checkpoint}: {error}") from None
    if [(p.name, p.shape) for p in trained.model.parameters()] != [
        (p.name, p.shape) for p in model.parameters()
    ]:
        raise WeightsError(
            f"model.weights = {checkpoint}: that run trained {trained.plan.model.name}, a model of "
            "other sizes"
        )
    trained.check_base()
    return trained


class _RecommenderWeights:
    """The weights of a recommender: those of the decoder are loaded, the others are new."""

    def __init__(self, model: Recommender, decoder: WeightSource, new: WeightSource) -> None:
        self._loaded = {p.name for p in model.parameters() if is_of_decoder(p)}
        self._decoder, self._new = decoder, new

    def tensor(self, name: str) -> NDArray[np.generic]:
        return (self._decoder if name in self._loaded else self._new).tensor(name)
