"""``memconsole_trainer.command sample RUN_DIR``: continue a text, or answer a record or a message,
with a run's model."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memconsole.plan.plan import Plan, PlanError, nearest, quote, replace
from memconsole.plan.templates.chat import CHAT_ANSWER, FIELDS, RecordError
from memconsole.plan.templates.choice import template_of
from memconsole_trainer import text_streamer
from memconsole_trainer.data.sources.records import Record
from memconsole_trainer.data.text.tokens.tokenizer import Tokenizer
from memconsole_trainer.engine import Engine, Sampling
from memconsole_trainer.tasks.answering import MOST_ANSWER_TOKENS, Answerer, fills_context
from memconsole_trainer.weights import trained
from memconsole_trainer.weights.tokenizer_export import ends_of_source, stop_tokens

if TYPE_CHECKING:
    from memconsole.plan.templates.template import Template

TOKENS = 64
"""Tokens that continue a prompt, if not said otherwise."""
TEMPERATURE = 0.8


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--prompt", default="")
    parser.add_argument("--message")
    add_options(parser)
    options = parser.parse_args()
    try:
        options.prompt, options.message = typed(options.prompt), typed(options.message)
        trained_model = trained.read(options.run, options.checkpoint, options.device)
        record = asked(trained_model.plan, options.record, options.message)
        tokenizer, engine = ready(trained_model)
    except (PlanError, ValueError, OSError) as error:
        print(f"memconsole: {error}", file=sys.stderr)
        return 2
    if trained_model.note:
        print(f"step {trained_model.checkpoint.step:,}{trained_model.note}", file=sys.stderr)
    if record is not None:
        return answer(trained_model, engine, tokenizer, record, options)
    prompt = tokenizer.prompt(options.prompt)
    room = trained_model.architecture.max_positions - len(prompt)
    if room < 1:
        return too_long(len(prompt), trained_model.architecture.max_positions)
    stops = stop_tokens(trained_model.plan, tokenizer)
    most = options.tokens or TOKENS
    shown = text_streamer.TextStreamer(
        engine, lambda prompt, new: options.prompt + tokenizer.continuation(prompt, new, stops)
    )
    drawn = dataclasses.replace(sampling_of(options, TEMPERATURE), stop=stops)
    new = shown.generate(prompt, min(most, room), drawn)
    shown.end(options.prompt + tokenizer.continuation(prompt, new, stops))
    if fills_context(new, room, most, stops):
        tell_full(trained_model.architecture.max_positions)
    return shown.code


def typed(given: str | None) -> str | None:
    """A text of the command line; of "-", what standard input holds, without the line break at its end."""
    if given != "-":
        return given
    return sys.stdin.buffer.read().decode("utf-8", "replace").removesuffix("\n")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that all commands of sampling have."""
    parser.add_argument("--record", action="append", default=[])
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--temperature", type=float)
    parser.add_argument("--top-k", type=int, default=50)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint", default=trained.BEST_OR_LAST)
    parser.add_argument("--device")


def ready(trained_model: trained.TrainedModel) -> tuple[Tokenizer, Engine]:
    """The run's tokenizer, and an engine with its weights. Raises what `trained.read` raises.

    If the weights are stored in fp32, the engine also computes in fp32, as programs that load an export do.
    """
    tokenizer = trained_model.tokenizer()
    if not trained_model.adapted and trained_model.plan.optimize.precision in ("bf16", "fp16"):
        plan = replace(trained_model.plan, {"optimize.precision": "fp32"})
        trained_model = dataclasses.replace(trained_model, plan=plan)
    return tokenizer, trained_model.engine()


def asked(plan: Plan, fields: Sequence[str], message: str | None) -> dict[str, Any] | None:
    """The record to answer; None to continue a text. Raises `PlanError`."""
    if not fields and message is None:
        return None
    template = template_of(plan)
    if template is None:
        raise PlanError("the run trained without data.template: give --prompt")
    if message is not None and not template.chat:
        raise PlanError(f"the run answers records: give --record {_missing(template, ())}")
    if message is None and template.chat:
        raise PlanError("the run answers chats: give --message")
    record = given_fields(template, fields)
    if message is not None:
        record["messages"] = [{"role": "user", "content": message}]
    try:
        template.question(record)
    except RecordError as error:
        missing = "" if template.chat else f"; give --record {_missing(template, tuple(record))}"
        raise PlanError(f"the record {error}{missing}") from None
    return record


def given_fields(template: Template, fields: Sequence[str]) -> dict[str, Any]:
    """The values of `--record FIELD=VALUE`: those of a record but for its answers, or those that a chat has beside its
    messages. Raises `PlanError`."""
    asked = (name for name in template.fields if name not in template.answer_fields)
    known = FIELDS if template.chat else tuple(asked)
    record: dict[str, Any] = {}
    for field in fields:
        name, equals, value = field.partition("=")
        if not equals or name not in known:
            raise PlanError(
                f"--record {quote(field)}: expected FIELD=VALUE with one of {', '.join(known)}"
                f"{nearest(name, known)}"
            )
        record[name] = value
    return record


def answer(
    trained_model: trained.TrainedModel,
    engine: Engine,
    tokenizer: Tokenizer,
    record: dict[str, Any],
    options: argparse.Namespace,
) -> int:
    """Print the answers to a record, one line each. Returns the exit code."""
    template = template_of(trained_model.plan)
    assert template is not None
    positions = trained_model.architecture.max_positions
    most = options.tokens or MOST_ANSWER_TOKENS
    ends = ends_of_source(trained_model.plan, tokenizer)
    answerer = Answerer(template, tokenizer, most, positions, ends)
    asked = Record("the record", record)
    shown = text_streamer.of_record(engine, answerer, asked)
    said = answerer.answer(shown, asked, sampling_of(options))
    if said.room < 1:
        return too_long(said.prompt_tokens, positions)
    if list(said.answers) == [CHAT_ANSWER]:
        shown.end(said.answers[CHAT_ANSWER])
    else:
        shown.end("\n".join(f"{name}: {text}" for name, text in said.answers.items()))
    if said.filled:
        tell_full(positions)
    return shown.code


def _missing(template: Template, given: Sequence[str]) -> str:
    names = [n for n in template.fields if n not in (*template.answer_fields, *given)]
    return " --record ".join(f"{name}=…" for name in names)


def sampling_of(options: argparse.Namespace, temperature: float = 0.0) -> Sampling:
    """What the options say, at `temperature` if they give none."""
    given = options.temperature
    return Sampling(
        temperature if given is None else given, options.top_k, options.top_p, options.seed
    )


def tell_full(positions: int) -> None:
    print(f"the context of {positions} tokens is full", file=sys.stderr)


def too_long(tokens: int, positions: int) -> int:
    print(
        f"memconsole: the prompt is {tokens} tokens, the model holds {positions}", file=sys.stderr
    )
    return 2
