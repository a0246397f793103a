"""The plan's section on data: sources, rows, tokenizer and what is held out."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from memconsole.plan.sections.section import MOST, Section, about

HeldOut = Literal["spread", "last"]
LossOn = Literal["all", "answers"]
Standardize = Literal["auto", "always", "never"]
OF_TEXT = (
    "data.text_column",
    "data.template",
    "data.loss_on",
    "data.split",
    "data.tokenizer",
    "data.tokenizer_examples",
    "data.vocab_size",
    "data.characters",
    "data.lowercase",
    "data.code_field",
    "data.held_out",
    "data.validation",
    "data.mix",
)
"""The settings of tasks that read text. Other tasks refuse them."""
OF_RATINGS = ("data.user_column", "data.item_column", "data.time_column")
"""The settings of the task that reads ratings. Other tasks refuse them."""

OF_WINDOWS = ("data.standardize",)
"""The settings of the task that reads windows of numbers. Other tasks refuse them."""


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
    user_column: Annotated[
        str | None, about("column of ratings with the user; none finds it by a common name")
    ] = None
    item_column: Annotated[
        str | None, about("column of ratings with the item; none finds it by a common name")
    ] = None
    time_column: Annotated[
        str | None,
        about(
            "column of ratings with the time; none finds it by a common name, or takes the order of the file"
        ),
    ] = None
    standardize: Annotated[
        Standardize,
        about(
            "features and outputs of windows: less their mean, over their deviation; auto: if they are far from 0 and 1"
        ),
    ] = "auto"
    template: Annotated[
        str | None,
        about(
            "how a record or a chat becomes text: model (the model's own), chatml, llama-3, gemma, plain, prompt, equipment, a "
            "file, or a text with {{ fields }}; none: text_column"
        ),
    ] = None
    loss_on: Annotated[LossOn, about("learn every token, or only the answers of a template")] = (
        "all"
    )
    split: Annotated[str, about("split of a hub dataset")] = "train"
    tokenizer: Annotated[
        str | None,
        about(
            "tokenizer.json, tokenizer.model, vocab.json beside merges.txt, or their folder; none: the model's own, or "
            "one trained on the data"
        ),
    ] = None
    tokenizer_examples: Annotated[
        int,
        about("documents, from all of the data, that the tokenizer is trained on", ge=1, le=MOST),
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
    held_out: Annotated[
        HeldOut, about("which documents are held out: some from all of the data, or the last ones")
    ] = "spread"
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
