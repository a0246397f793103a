"""The plan's section on training: length, rates, evaluation, checkpoints and what is reported."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from memconsole.plan.sections.section import MOST, Section, about

Objective = Literal["next-token", "dpo", "orpo", "simpo"]
OBJECTIVE_NAMES: dict[Objective, str] = {
    "next-token": "next-token loss",
    "dpo": "DPO",
    "orpo": "ORPO",
    "simpo": "SimPO",
}
Schedule = Literal["constant", "linear", "cosine", "wsd"]
OnOutOfMemory = Literal["stop", "halve"]
LearningRateScale = Literal["none", "sqrt", "linear"]


class TrainChoice(Section, frozen=True, kw_only=True):
    objective: Annotated[
        Objective,
        about(
            "what text teaches: the next token, or which of two answers is preferred (dpo, orpo, simpo)"
        ),
    ] = "next-token"
    dpo_beta: Annotated[
        float,
        about("DPO: how strongly the model is held near the weights it starts from", gt=0.0),
    ] = 0.1
    orpo_lambda: Annotated[
        float, about("ORPO: weight of the preference beside the loss of the chosen answer", gt=0.0)
    ] = 0.1
    simpo_beta: Annotated[
        float,
        about("SimPO: multiplies the mean log-likelihood of an answer's tokens", gt=0.0),
    ] = 2.0
    simpo_gamma: Annotated[
        float, about("SimPO: margin by which the chosen answer's reward should be larger", ge=0.0)
    ] = 1.0
    epochs: Annotated[int, about("passes over the data", ge=1, le=1_000_000)] = 3
    max_steps: Annotated[
        Annotated[int, Meta(ge=1, le=MOST)] | None, about("stop after this many optimizer steps")
    ] = None
    batch_size: Annotated[int, about("rows per micro-batch and device", ge=1, le=1_048_576)] = 16
    learning_rate: Annotated[
        Annotated[float, Meta(gt=0.0, le=10.0)] | None,
        about(
            "peak learning rate; none: follows model size, optimizer, adapters, and whether the weights were trained before"
        ),
    ] = None
    scale_learning_rate: Annotated[
        LearningRateScale,
        about("multiply the rate by effective batch / reference_batch, or by its square root"),
    ] = "none"
    reference_batch: Annotated[
        int, about("effective batch in rows that learning_rate is meant for", ge=1, le=MOST)
    ] = 16
    seed: Annotated[
        int, about("seed of the first weights, the order of data and sampling", ge=0, lt=2**32)
    ] = 42
    warmup_steps: Annotated[
        Annotated[int, Meta(ge=0, le=MOST)] | None,
        about("steps of linear warm-up; none: by warmup_ratio"),
    ] = None
    warmup_ratio: Annotated[
        Annotated[float, Meta(ge=0.0, le=1.0)] | None,
        about(
            "share of all steps in which the rate rises; none: a tenth, 3 % for trained weights and adapters, 2,000 steps at most"
        ),
    ] = None
    schedule: Annotated[
        Schedule, about("after the warm-up; wsd stays at the peak, then decays at the end")
    ] = "cosine"
    decay_share: Annotated[
        float, about("share of all steps in which wsd decays, the last ones", gt=0.0, le=1.0)
    ] = 0.2
    decay_until: Annotated[
        Annotated[int, Meta(ge=1, le=MOST)] | None,
        about("step at which the rate has fallen to its minimum, and stays; none: the last one"),
    ] = None
    minimum_learning_rate: Annotated[
        float, about("end of the schedule, as a share of the peak", ge=0.0, le=1.0)
    ] = 0.1
    weight_decay: Annotated[
        Annotated[float, Meta(ge=0.0)] | None,
        about(
            "on matrices and embeddings; none: follows optimizer, adapters, and whether the weights were trained before"
        ),
    ] = None
    grad_clip: Annotated[float, about("global gradient norm; 0 turns clipping off", ge=0.0)] = 1.0
    beta1: Annotated[float, about("decay of the first moment", ge=0.0, lt=1.0)] = 0.9
    beta2: Annotated[float, about("decay of the second moment", ge=0.0, lt=1.0)] = 0.95
    epsilon: Annotated[float, about("added to the denominator", gt=0.0)] = 1e-8
    dropout: Annotated[
        float,
        about(
            "share of embeddings and of outputs of attention and MLP that is dropped while training",
            ge=0.0,
            lt=1.0,
        ),
    ] = 0.0
    attention_dropout: Annotated[
        float,
        about("share of the attention weights that is dropped while training", ge=0.0, lt=1.0),
    ] = 0.0
    expert_balance: Annotated[
        Annotated[float, Meta(ge=0.0, le=1.0)] | None,
        about(
            "weight of the loss that spreads tokens evenly over experts; none: 0.01 from scratch, 0 for weights that were trained before"
        ),
    ] = None
    ema_decay: Annotated[
        float,
        about(
            "moving average of the weights, evaluated, sampled and exported in their place; 0: off",
            ge=0.0,
            lt=1.0,
        ),
    ] = 0.0
    log_every: Annotated[int, about("steps between reported losses", ge=1, le=MOST)] = 10
    tensorboard: Annotated[bool, about("write TensorBoard event files into the run's folder")] = (
        False
    )
    wandb: Annotated[
        Literal["none", "online", "offline"],
        about("send the figures to Weights & Biases, or keep them for wandb sync"),
    ] = "none"
    mlflow: Annotated[
        bool, about("send the figures to MLFLOW_TRACKING_URI, or into a folder for mlflow ui")
    ] = False
    deterministic: Annotated[
        bool, about("the same bits from the same seed on GPUs too; slower kernels")
    ] = False
    evaluate_every: Annotated[
        int, about("steps between evaluations; 0 means at each epoch's end", ge=0, le=MOST)
    ] = 0
    evaluation_batches: Annotated[
        int,
        about(
            "validation batches per evaluation, spread over all held-out rows; 0: all",
            ge=0,
            le=MOST,
        ),
    ] = 0
    evaluation_train_batches: Annotated[
        int,
        about(
            "batches of training rows evaluated beside the validation batches; 0: none",
            ge=0,
            le=1_000_000,
        ),
    ] = 4
    early_stopping_patience: Annotated[
        int,
        about(
            "evaluations in a row, none the best so far, that end the run; 0: off", ge=0, le=MOST
        ),
    ] = 0
    early_stopping_minimum: Annotated[
        float, about("by how much an evaluation must be better to count", ge=0.0)
    ] = 0.0
    evaluation_batch_size: Annotated[
        Annotated[int, Meta(ge=1, le=1_048_576)] | None,
        about(
            "rows per evaluation batch and device; none: as many as a step, one micro-batch at a time"
        ),
    ] = None
    checkpoint_every: Annotated[
        int, about("steps between checkpoints; 0 means at each epoch's end", ge=0, le=MOST)
    ] = 0
    checkpoint_minutes: Annotated[
        float, about("most minutes that a crash can cost; 0: only as checkpoint_every says", ge=0.0)
    ] = 10.0
    save_only_best: Annotated[
        bool,
        about("save only when an evaluation is the best so far, and at a stop or the end"),
    ] = False
    keep_checkpoints: Annotated[
        int,
        about(
            "how many of the newest checkpoints are kept; the best is always kept", ge=1, le=MOST
        ),
    ] = 2
    preflight: Annotated[
        bool,
        about(
            "first rehearse one checkpoint, one evaluation and one step; the run is the same as without"
        ),
    ] = True
    on_out_of_memory: Annotated[
        OnOutOfMemory,
        about(
            "halve: go on with half the micro-batch, twice the accumulation, the same effective batch"
        ),
    ] = "stop"
    answered_records: Annotated[
        int,
        about("held-out records answered and scored at each evaluation; 0: none", ge=0, le=MOST),
    ] = 16
    sample_tokens: Annotated[
        int, about("tokens sampled at each evaluation; 0: none", ge=0, le=1_048_576)
    ] = 64
