"""The plan's sections: every setting with its type, default, limits and one line of help."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from memconsole.errors import UserError
from memconsole.plan.hybrid import HybridChoice
from memconsole.plan.launching import LaunchChoice
from memconsole.plan.section import MOST, Section, about

BACKENDS = ("torch", "jax")
Precision = Literal["fp32", "bf16", "fp16", "bf16-sr"]
Checkpointing = Literal["none", "selective", "attention", "full"]
BaseStorage = Literal["bf16", "int8", "nf4"]
OptimizerName = Literal["adamw", "adamw-8bit", "adamw8-all", "adafactor", "lion", "muon", "sgd"]
EIGHT_BIT: tuple[OptimizerName, ...] = ("adamw-8bit", "adamw8-all")
"""Optimizers whose moments are stored in 8 bits."""
OptimizerOffload = Literal["none", "cpu", "pinned", "compressed"]
Sharding = Literal["none", "ddp", "fsdp"]
Heap = Literal["fast", "jemalloc", "tight"]
Schedule = Literal["constant", "linear", "cosine", "wsd"]
OnOutOfMemory = Literal["stop", "halve"]
LearningRateScale = Literal["none", "sqrt", "linear"]
LoraTargets = Literal["all", "attention", "query-value", "mlp"]
LossOn = Literal["all", "answers"]


class PlanError(UserError, ValueError):
    """A plan that cannot be used; the message is one line for the person who wrote it."""

    def __init__(self, message: str, key: str | None = None) -> None:
        super().__init__(message)
        self.key = key


def printable(text: str, limit: int = 200) -> str:
    """`text` on one line: control characters escaped, the middle of a long one left out."""
    if len(text) > limit:
        text = f"{text[: limit - 40]}…{text[-39:]}"
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text
    )


def quote(value: Any) -> str:
    """A value as an error line shows it: text in quotes, the rest as TOML or Python writes it."""
    if isinstance(value, str):
        return f'"{printable(value)}"'
    if value is None or isinstance(value, bool):
        return {None: "none", True: "true", False: "false"}[value]
    if isinstance(value, int) and value.bit_length() > 200:
        return "a number of more than 60 digits"
    return printable(repr(value))


class ModelChoice(Section, frozen=True, kw_only=True):
    name: Annotated[
        str, about("catalog name, or a directory / hub id with a Hugging Face config.json")
    ] = "stories"
    target_params: Annotated[
        Annotated[int, Meta(ge=100_000, le=2_000_000_000)] | None,
        about("parameters to aim for, for sized families"),
    ] = None
    weights: Annotated[
        str | None,
        about("random: from scratch; a run's checkpoint; none: those in the model's directory"),
    ] = None
    decoder: Annotated[
        str | None,
        about("a recommender's decoder: catalog name, directory or hub id; none: its own"),
    ] = None
    items: Annotated[
        Annotated[int, Meta(ge=2, le=100_000_000)] | None,
        about("items that a recommender can hold; none: its own number"),
    ] = None
    clusters: Annotated[
        Annotated[int, Meta(ge=1, le=1_000_000)] | None,
        about("clusters of a recommender's items; none: its own number"),
    ] = None


class DataChoice(Section, frozen=True, kw_only=True):
    source: Annotated[str, about("catalog name, path, hf://owner/name, or *.h5")] = "python-stdlib"
    sequence_length: Annotated[int, about("tokens per row", ge=8, le=1_048_576)] = 128
    stride: Annotated[
        Annotated[int, Meta(ge=1, le=1_048_576)] | None,
        about("tokens between row starts; none means sequence_length"),
    ] = None
    isolate_documents: Annotated[
        bool, about("documents packed into one row do not see one another")
    ] = False
    streaming: Annotated[bool, about("tokenize on the fly instead of holding every token")] = True
    shuffle_buffer: Annotated[
        int, about("rows shuffled together when streaming", ge=0, le=MOST)
    ] = 10_000
    max_examples: Annotated[
        Annotated[int, Meta(ge=1, le=MOST)] | None, about("use only the first documents")
    ] = None
    text_column: Annotated[str, about("column holding the text")] = "text"
    template: Annotated[
        str | None,
        about(
            "how a record or a chat becomes text: a template's name, a file, a text with {{ fields }}; none: text_column"
        ),
    ] = None
    loss_on: Annotated[LossOn, about("learn every token, or only the answers of a template")] = (
        "all"
    )
    split: Annotated[str, about("split of a hub dataset")] = "train"
    tokenizer: Annotated[str | None, about("path of a tokenizer.json; none trains one")] = None
    tokenizer_examples: Annotated[
        int, about("documents the tokenizer is trained on", ge=1, le=MOST)
    ] = 1_000
    vocab_size: Annotated[
        Annotated[int, Meta(ge=257, le=16_777_216)] | None,
        about("entries of the trained tokenizer; none takes the model's"),
    ] = None
    characters: Annotated[
        bool, about("the trained tokenizer has a token for each character, in place of BPE pieces")
    ] = False
    lowercase: Annotated[bool, about("the trained tokenizer writes everything in lower case")] = (
        False
    )
    code_field: Annotated[
        str | None,
        about("field of records whose values the trained tokenizer keeps whole, a token each"),
    ] = None
    validation_fraction: Annotated[float, about("share of documents held out", ge=0.0, le=0.5)] = (
        0.05
    )
    validation: Annotated[
        str | None,
        about("what to validate on: a path, catalog name, hub dataset, or a split of a hub source"),
    ] = None
    mix: Annotated[
        str | None,
        about("other sources and their shares of the rows: code.jsonl=0.2, hf://owner/name=0.1"),
    ] = None
    cache_gib: Annotated[
        int,
        about("GiB of disk for tokens kept between epochs and runs; 0: none", ge=0, le=1_000_000),
    ] = 20


class DeviceChoice(Section, frozen=True, kw_only=True):
    name: Annotated[
        str, about("auto, cpu, cuda:0, mps, tpu, or a catalog device such as rtx-3060-12gb")
    ] = "auto"
    count: Annotated[int, about("devices of that kind", ge=1, le=4096)] = 1
    threads: Annotated[
        Annotated[int, Meta(ge=1, le=4096)] | None,
        about("CPU threads of a run's computations; none: one for each core it may use"),
    ] = None
    memory_fraction: Annotated[
        Annotated[float, Meta(gt=0.0, le=1.0)] | None,
        about("share of the device the framework may use"),
    ] = None


class TrainChoice(Section, frozen=True, kw_only=True):
    epochs: Annotated[int, about("passes over the data", ge=1, le=1_000_000)] = 3
    max_steps: Annotated[
        Annotated[int, Meta(ge=1, le=MOST)] | None, about("stop after this many optimizer steps")
    ] = None
    batch_size: Annotated[int, about("rows per micro-batch and device", ge=1, le=1_048_576)] = 16
    learning_rate: Annotated[
        Annotated[float, Meta(gt=0.0, le=10.0)] | None,
        about("peak learning rate; none: follows model size, optimizer and adapters"),
    ] = None
    scale_learning_rate: Annotated[
        LearningRateScale,
        about("multiply the rate by (effective batch / reference_batch), or its root"),
    ] = "none"
    reference_batch: Annotated[
        int, about("effective batch in rows that learning_rate is meant for", ge=1, le=MOST)
    ] = 16
    seed: Annotated[int, about("of weights, order and sampling", ge=0, lt=2**32)] = 42
    warmup_steps: Annotated[
        Annotated[int, Meta(ge=0, le=MOST)] | None,
        about("steps of linear warm-up; none: by warmup_ratio"),
    ] = None
    warmup_ratio: Annotated[
        Annotated[float, Meta(ge=0.0, le=1.0)] | None,
        about(
            "share of all steps in which the rate rises; none: a tenth, less for trained weights"
        ),
    ] = None
    schedule: Annotated[
        Schedule, about("after the warm-up; wsd stays at the peak, then decays at the end")
    ] = "cosine"
    decay_share: Annotated[
        float, about("share of all steps in which wsd decays, the last ones", gt=0.0, le=1.0)
    ] = 0.2
    minimum_learning_rate: Annotated[
        float, about("end of the schedule, as a share of the peak", ge=0.0, le=1.0)
    ] = 0.1
    weight_decay: Annotated[
        Annotated[float, Meta(ge=0.0)] | None,
        about("on matrices and embeddings; none: follows optimizer and adapters"),
    ] = None
    grad_clip: Annotated[float, about("global gradient norm; 0 turns clipping off", ge=0.0)] = 1.0
    beta1: Annotated[float, about("decay of the first moment", ge=0.0, lt=1.0)] = 0.9
    beta2: Annotated[float, about("decay of the second moment", ge=0.0, lt=1.0)] = 0.95
    epsilon: Annotated[float, about("added to the denominator", gt=0.0)] = 1e-8
    dropout: Annotated[
        float,
        about("of embeddings and of what attention and MLP add, while training", ge=0.0, lt=1.0),
    ] = 0.0
    attention_dropout: Annotated[
        float, about("of the shares with which a query reads the keys", ge=0.0, lt=1.0)
    ] = 0.0
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
        int, about("most validation batches per evaluation; 0 means all", ge=0, le=MOST)
    ] = 0
    early_stopping_patience: Annotated[
        int,
        about(
            "evaluations without a better validation loss that end the run; 0: off", ge=0, le=MOST
        ),
    ] = 0
    early_stopping_minimum: Annotated[
        float, about("nats by which a validation loss must be better to count", ge=0.0)
    ] = 0.0
    evaluation_batch_size: Annotated[
        Annotated[int, Meta(ge=1, le=1_048_576)] | None,
        about("rows per evaluation batch and device; none means batch_size"),
    ] = None
    checkpoint_every: Annotated[
        int, about("steps between checkpoints; 0 means at each epoch's end", ge=0, le=MOST)
    ] = 0
    checkpoint_minutes: Annotated[
        float, about("most minutes that a crash can cost; 0: only as checkpoint_every says", ge=0.0)
    ] = 10.0
    keep_checkpoints: Annotated[
        int, about("newest checkpoints kept, the best besides", ge=1, le=MOST)
    ] = 2
    preflight: Annotated[
        bool,
        about("first rehearse one checkpoint, one evaluation and one step, without trace"),
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


class OptimizeChoice(Section, frozen=True, kw_only=True):
    precision: Annotated[
        Precision,
        about(
            "fp32; 16-bit compute with fp32 weights; or bf16-sr: bf16 weights, stochastically rounded"
        ),
    ] = "fp32"
    gradient_checkpointing: Annotated[
        Checkpointing,
        about(
            "recompute activations in the backward pass (JAX: remat): all but block inputs (full), attention's outputs too "
            "(attention), matmuls' too (selective)"
        ),
    ] = "none"
    accumulation_steps: Annotated[
        int, about("micro-batches per optimizer step", ge=1, le=1_048_576)
    ] = 1
    optimizer: Annotated[
        OptimizerName,
        about("update rule and its state; adamw8-all: that of embedding and head in 8 bits, too"),
    ] = "adamw"
    optimizer_offload: Annotated[
        OptimizerOffload,
        about("where the optimizer state waits between steps; compressed: there in 16 bits"),
    ] = "none"
    optimizer_in_backward: Annotated[
        bool, about("update each weight as soon as its gradient is there")
    ] = False
    activation_offload: Annotated[bool, about("keep saved activations off the device")] = False
    fused_loss: Annotated[bool, about("chunked loss: the full logits never exist")] = False
    freeze_base: Annotated[bool, about("no gradient for the loaded weights; adapters imply it")] = (
        False
    )
    lora_rank: Annotated[
        int, about("rank of the adapters on a frozen base; 0: none", ge=0, le=1024)
    ] = 0
    lora_alpha: Annotated[
        Annotated[float, Meta(gt=0.0, le=100_000.0)] | None,
        about("adapters count alpha / rank times; none: twice the rank"),
    ] = None
    lora_targets: Annotated[
        LoraTargets, about("matrices that have adapters: of attention and MLP, or some of them")
    ] = "all"
    lora_dropout: Annotated[
        float, about("of the adapters' inputs, while training", ge=0.0, lt=1.0)
    ] = 0.0
    base_storage: Annotated[
        BaseStorage,
        about("matrices of a frozen base: as they are computed with, or 8- or 4-bit codes"),
    ] = "bf16"
    compile: Annotated[bool, about("torch.compile the training step")] = False
    sharding: Annotated[
        Sharding, about("over several devices: copies (ddp), or weights and state split (fsdp)")
    ] = "none"
    heap: Annotated[
        Heap,
        about(
            "of a CPU run: fast keeps freed memory; jemalloc, too, closely packed; tight gives it back at once"
        ),
    ] = "fast"


class Plan(Section, frozen=True, kw_only=True):
    """Everything picked for one run. `Plan()` is the default plan."""

    backend: Annotated[str, about("torch, jax, or an installed backend")] = "torch"
    model: ModelChoice = ModelChoice()
    data: DataChoice = DataChoice()
    device: DeviceChoice = DeviceChoice()
    train: TrainChoice = TrainChoice()
    optimize: OptimizeChoice = OptimizeChoice()
    hybrid: HybridChoice = HybridChoice()
    launch: LaunchChoice = LaunchChoice()

    @property
    def micro_batch_tokens(self) -> int:
        """Tokens one device holds at a time."""
        return self.train.batch_size * self.data.sequence_length

    @property
    def effective_batch(self) -> int:
        """Rows per optimizer step over all devices."""
        return self.train.batch_size * self.optimize.accumulation_steps * self.device.count

    @property
    def evaluation_batch(self) -> int:
        """Rows one device holds at a time while it evaluates."""
        return self.train.evaluation_batch_size or self.train.batch_size

    @property
    def tokens_per_step(self) -> int:
        return self.effective_batch * self.data.sequence_length

    @property
    def stride(self) -> int:
        return self.data.stride or self.data.sequence_length
