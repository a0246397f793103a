"""``memconsole_trainer.command chat RUN_DIR``: a conversation with a run's model, line by line."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from memconsole.plan.plan import PlanError
from memconsole.plan.templates.chat import CHAT_ANSWER, Message, RecordError
from memconsole.plan.templates.choice import template_of, templates
from memconsole_trainer import text_streamer
from memconsole_trainer.data.sources.records import Record
from memconsole_trainer.engine import Generator
from memconsole_trainer.sample import add_options, given_fields, ready, sampling_of, tell_full
from memconsole_trainer.tasks.answering import MOST_ANSWER_TOKENS, Answered, Answerer
from memconsole_trainer.weights import trained
from memconsole_trainer.weights.tokenizer_export import ends_of_source

PROMPT = "> "
FORGET, LEAVE = "/forget", "/exit"
COMMAND = re.compile(r"/\w*(\s|$)")
"""A line that starts with it is no message; a path, as in "/etc/fstab is empty", is one."""
COMMANDS = f"{FORGET} begins anew, {LEAVE} ends"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--system")
    add_options(parser)
    return talk(parser.parse_args())


def talk(options: argparse.Namespace) -> int:
    """Answer the user's messages until the user ends the chat. Returns the exit code."""
    try:
        trained_model = trained.read(options.run, options.checkpoint, options.device)
        positions = trained_model.architecture.max_positions
        template = template_of(trained_model.plan)
        if template is None or not template.chat:
            chats = [name for name, one in templates().items() if "messages" in one.text]
            raise PlanError(
                "the run did not learn chats: memconsole sample continues its texts and answers its "
                f"records; data.template = {', '.join(chats)} or model trains on chats"
            )
        others = given_fields(template, options.record)
        print(f"loading the weights of step {trained_model.checkpoint.step:,} ...", file=sys.stderr)
        tokenizer, engine = ready(trained_model)
    except (PlanError, ValueError, OSError) as error:
        print(f"memconsole: {error}", file=sys.stderr)
        return 2
    print(
        f"step {trained_model.checkpoint.step:,}{trained_model.note}; {COMMANDS}", file=sys.stderr
    )
    most = options.tokens or MOST_ANSWER_TOKENS
    ends = ends_of_source(trained_model.plan, tokenizer)
    answerer = Answerer(template, tokenizer, most, positions, ends)
    first: list[Message] = []
    if options.system:
        first = [{"role": "system", "content": options.system}]
    said, forgotten = list(first), False
    for number, line in enumerate(_lines()):
        if line == FORGET:
            said, forgotten = list(first), False
            continue
        if COMMAND.match(line):
            print(f"commands: {COMMANDS}", file=sys.stderr)
            continue
        said.append({"role": "user", "content": line})
        options.seed += min(number, 1)
        try:
            chat = Record("the chat", {**others, "messages": said})
            if forget(answerer, chat, len(first)) and not forgotten:
                forgotten = True
                print(
                    f"the context of {positions} tokens is full: the oldest messages are forgotten from here on",
                    file=sys.stderr,
                )
            shown = text_streamer.of_record(engine, answerer, chat)
            one = _answered(answerer, shown, chat, options)
        except RecordError as error:
            print(f"memconsole: the chat {error}", file=sys.stderr)
            said.pop()
            continue
        if one.room < 1:
            print(
                f"memconsole: {one.prompt_tokens} tokens, the model holds {positions}",
                file=sys.stderr,
            )
            said.pop()
            continue
        answer = one.answers[CHAT_ANSWER]
        shown.end(answer)
        if one.filled:
            tell_full(positions)
        if answer or not shown.interrupted:
            said.append({"role": "assistant", "content": answer})
        else:
            said.pop()
    return 0


def forget(answerer: Answerer, chat: Record, kept: int) -> bool:
    """Delete the oldest messages of a chat, after the first `kept`, until the answer has room: a quarter of
    the model's positions, if an answer may be that long. Returns whether any was deleted. Raises `RecordError`."""
    wanted = min(answerer.most_tokens, answerer.positions // 4)
    said: list[Message] = chat.fields["messages"]
    before = len(said)
    while len(said) > kept + 2 and answerer.room(chat) < wanted:
        del said[kept : kept + 2]
    return len(said) < before


def _answered(
    answerer: Answerer, engine: Generator, chat: Record, options: argparse.Namespace
) -> Answered:
    """The answer to the last message."""
    return answerer.answer(engine, chat, sampling_of(options))


def _lines() -> Iterator[str]:
    """The lines that the user types, without empty ones, until the end of input or a word that ends the chat."""
    shown = PROMPT if sys.stdin.isatty() else ""
    while True:
        try:
            line = input(shown).strip()
        except (EOFError, KeyboardInterrupt):
            if shown:
                print()
            return
        if line == LEAVE:
            return
        if line:
            yield line
