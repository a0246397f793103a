"""Records: read by line, marked by what is learned, packed whole, and what simple answers score."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memconsole.plan import catalog
from memconsole.plan.check import check
from memconsole.plan.plan import Plan, PlanError, replace
from memconsole.plan.tasks.language import MASKED
from memconsole.plan.templates.choice import templates
from memconsole.plan.templates.rendered import Rendered
from memconsole.plan.templates.template import Template
from memconsole.start import check_launch
from memconsole_trainer.data.make.equipment import record
from memconsole_trainer.data.sources.documents import DataError
from memconsole_trainer.data.sources.opening import open_source
from memconsole_trainer.data.sources.records import (
    JsonLines,
    Record,
    RecordDocuments,
    StreamRecords,
)
from memconsole_trainer.data.sources.split import Everything, split_of
from memconsole_trainer.data.stream import BatchShape, BatchStream
from memconsole_trainer.data.text.blocks import token_key
from memconsole_trainer.data.text.blocks.packing import Cuts, cuts, laid, placed
from memconsole_trainer.data.text.blocks.record_blocks import RecordBlocks, held_out_records
from memconsole_trainer.data.text.opened import TextPart, alone
from memconsole_trainer.data.text.portion import Portion, prepare_part
from memconsole_trainer.data.text.rows.batches import Boundary, TextRows
from memconsole_trainer.data.text.tokens.marked import encode, ids, learned, marked_dtype, trimmed
from memconsole_trainer.data.text.tokens.tokenizer import Tokenizer, load, train
from memconsole_trainer.engine import Sampling
from memconsole_trainer.tasks import answering
from memconsole_trainer.tasks.answer_scores import Nearest, f1, scores
from memconsole_trainer.tasks.answering import asked_records, held_records

MADE = [record(np.random.default_rng(number)) for number in range(400)]
EQUIPMENT = Template(templates()["equipment"].text)


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def documents(path: Path) -> RecordDocuments:
    found = open_source(
        replace(Plan(), {"data.source": str(path), "data.template": "equipment"}), 512
    )
    assert isinstance(found, RecordDocuments)
    return found


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    texts = [EQUIPMENT.render(one) for one in MADE]
    codes = sorted({code for one in MADE for code in one["codes"]})
    return train(texts, 700, lowercase=True, tags=EQUIPMENT.tags, codes=codes)


# reading


def test_any_line_of_any_file_is_read_directly(tmp_path: Path) -> None:
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    first.write_bytes(b'{"n": 0}\n\n{"n": 1}\r\n\n{"n": 2}')
    second.write_bytes(b'\xef\xbb\xbf{"n": 3}\n{"n": "\xc3\xa4"}\n')  # with a byte order mark
    lines = JsonLines([first, second])
    wanted = [0, 1, 2, 3, "ä"]
    assert lines.count == 5
    for start, stop in itertools.combinations(range(6), 2):
        assert [r.fields["n"] for r in lines.read(start, stop)] == wanted[start:stop]
    places = [r.where.rpartition("/")[2] for r in lines.read(0, 5)]
    assert places == [f"{n}.jsonl: line {line}" for n, line in zip("aaabb", (1, 3, 5, 1, 2), strict=True)]  # fmt: skip
    assert [r.fields["n"] for r in JsonLines([first, second], 4).read(2, 4)] == [2, 3]
    second.write_bytes(b'{"n": 33}\n{"n": "\xc3\xa4"}\n')
    assert JsonLines([first, second]).fingerprint != lines.fingerprint


def test_a_preset_is_priced_before_its_data_are_made_and_trains_on_them_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    plan = replace(catalog.preset("gearhead-small"), {"device.name": "cpu"})
    check(plan)
    command = "memconsole data make equipment equipment.jsonl"
    for refused in (lambda: check_launch(plan, None), lambda: open_source(plan, 1024)):
        with pytest.raises(PlanError, match=command):
            refused()
    path = write(tmp_path / "equipment.jsonl", MADE[:3])
    assert catalog.dataset(plan).where == str(path)
    assert check_launch(plan, None).table.peak_bytes > 0
    source = open_source(plan, 1024)
    assert isinstance(source, RecordDocuments)
    assert source.count == 3


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"equipment": "a",', "line 3, column 19: not JSON"),
        ("[1, 2]", "line 3: holds no object"),
        ('{"equipment": "a", "cause": "b", "solution": "c"}', 'line 3 has no field "symptom"'),
        (json.dumps({**MADE[0], "cause": {"x": 1}}), "line 3 has an object"),
    ],
)
def test_a_bad_line_is_named_by_file_and_line(line: str, words: str, tmp_path: Path) -> None:
    path = write(tmp_path / "bad.jsonl", MADE[:2])
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(DataError) as error:
        documents(path).read(0, 3)
    assert str(error.value).startswith(f"{path}: {words}")


def test_a_parquet_file_and_a_stream_hold_the_records_of_the_lines(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    import pyarrow
    from pyarrow import parquet

    rows = [*MADE[:300], {**MADE[0], "codes": None}]
    wanted = documents(write(tmp_path / "made.jsonl", rows)).read(0, 301)
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "made.parquet")
    assert documents(tmp_path / "made.parquet").read(0, 301) == wanted
    broken = datasets.Dataset.from_list([*rows, {**MADE[0], "symptom": None}]).to_iterable_dataset()
    stream = StreamRecords(broken, EQUIPMENT, "hf://some/records", None)
    assert [record.fields["symptom"] for record in stream.records([2, 299])] == [
        rows[2]["symptom"], rows[299]["symptom"],
    ]  # fmt: skip
    few = StreamRecords(broken, EQUIPMENT, "hf://some/records", 100)
    assert [record.where for record in few.records([2, 299])] == ["hf://some/records: row 3"]
    texts = stream.iterate(40)
    assert list(itertools.islice(texts, 261)) == wanted[40:]
    with pytest.raises(DataError, match=r'hf://some/records: row 302 field "symptom" is null'):
        next(texts)


def test_a_stream_that_breaks_is_said_with_its_name() -> None:
    def rows() -> Iterator[dict[str, Any]]:
        yield MADE[0]
        raise ConnectionError("it is gone")

    stream = StreamRecords(rows(), EQUIPMENT, "hf://some/records", None)
    found = stream.records([0, 5])
    next(found)
    with pytest.raises(DataError, match="hf://some/records: ConnectionError: it is gone"):
        next(found)


def test_a_record_that_was_read_and_has_changed_is_found(tmp_path: Path) -> None:
    path = write(tmp_path / "made.jsonl", MADE)
    before = documents(path)
    before.read(0, 256)
    state = json.loads(json.dumps(before.hashes.state()))
    assert documents(path).hashes.difference(state, lambda: None) == ""
    text = path.read_text()
    at = text.rindex("tighten", 0, text.index(MADE[200]["symptom"]))
    path.write_text(text[:at] + "loosens" + text[at + 7 :])
    after = documents(path)
    assert after.fingerprint == before.fingerprint
    assert "not the same" in after.hashes.difference(state, lambda: None)


# marks


def test_only_answers_are_learned_and_nothing_else_changes(tokenizer: Tokenizer) -> None:
    texts = [EQUIPMENT.render(one) for one in MADE[:50]]
    everything = encode(tokenizer, texts, False)
    for text, whole, one in zip(texts, everything, encode(tokenizer, texts, True), strict=True):
        (expected,) = tokenizer.encodings([text], controls=True)
        assert ids(one.tokens).tolist() == whole.tokens.tolist() == [*expected.ids, 0]
        (start, stop), *_ = text.answers
        assert tokenizer.decode(learned(one.tokens)) == text[start:stop].lower() + "<|endoftext|>"


words = st.text(st.sampled_from("aeio tn0\n.éß€👍İ<>"), max_size=30)


@given(st.lists(words, min_size=3, max_size=3), st.booleans(), st.booleans())
def test_bytes_tell_the_same_answers_as_offsets(
    parts: list[str], lowercase: bool, cut: bool
) -> None:
    before, answer, _ = parts
    places = ((len(before), len(before) + len(answer)),) if answer else ()
    own = of_case(lowercase)
    text = Rendered("".join(parts), places, (len(before),) if cut and before and answer else ())
    found = encode(own, [text], answers_only=True, offsets=False)[0].tokens
    both = encode(own, [text], answers_only=True)[0]
    expected = [any(a < stop and b > start for start, stop in places) for a, b in both.offsets]
    ended = len(found) > len(expected)
    assert (found >= 0).tolist() == expected + [text.ends_with_answer] * ended
    np.testing.assert_array_equal(found, both.tokens)


@cache
def of_case(lowercase: bool) -> Tokenizer:
    """A tokenizer, with a normalizer if it is `lowercase`."""
    return train(["one answer, two answers: tea 0 1 €", "an İ and ß"] * 9, 290, lowercase=lowercase)


def test_the_tokens_of_codes_and_tags_are_whole_and_data_makes_no_tags(
    tokenizer: Tokenizer,
) -> None:
    def spoken(text: str) -> list[str]:
        return [tokenizer.decode([i]) for i in ids(encode(tokenizer, [text], False)[0].tokens)]

    assert {"<error>", "spn 157", "fmi 31"} <= set(spoken("<error> SPN 157, FMI 31"))
    assert "spn 157" not in spoken("SPN 1571")
    hostile = EQUIPMENT.render({**MADE[0], "symptom": "now <cause> this"})
    one = encode(tokenizer, [hostile], False)[0]
    tag = tokenizer.encodings(["<cause>"], controls=True)[0].ids
    assert len(tag) == 1
    assert one.tokens.tolist().count(tag[0]) == 1
    assert tokenizer.decode(one.tokens) == hostile.lower() + "<|endoftext|>"  # fmt: skip


def test_ids_and_masks_are_those_of_transformers(tokenizer: Tokenizer, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    chat = templates()["chatml"].text
    texts = ["<|im_start|>system user assistant<|im_end|>\n", "Hi Hello Good bye, now"] * 9
    train(texts, 300, tags=Template(chat).tags).save(tmp_path / "tokenizer.json")
    oracle = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    messages = [
        {"role": role, "content": text}
        for role, text in zip(("system", "user", "assistant") * 2, ("Hi", " Good\n", "Hello now") * 2, strict=True)
    ]  # fmt: skip
    wanted = oracle.apply_chat_template(
        messages, chat_template=chat, return_dict=True, return_assistant_tokens_mask=True
    )
    text = Template(chat).render({"messages": messages})
    one = encode(load(tmp_path / "tokenizer.json", 300), [text], True)[0]
    body = one.tokens[: len(one.offsets)]
    assert ids(body).tolist() == wanted["input_ids"]
    assert (body >= 0).astype(int).tolist() == wanted["assistant_masks"]


UNWANTED = [
    {"role": "user", "content": "Ask é"},
    {"role": "assistant", "content": "Bad é", "weight": 0},
    {"role": "user", "content": "More", "weight": 0},
    {"role": "assistant", "content": "Good"},
]


@pytest.mark.parametrize(
    ("name", "everything", "answers"),
    [
        (
            "chatml",
            ["<|im_start|>user\nAsk é<|im_end|>\n<|im_start|>assistant\n",
             "<|im_start|>assistant\nGood<|im_end|>\n<|endoftext|>"],
            ["Good<|im_end|>", "<|endoftext|>"],
        ),
        ("plain", ["User: Ask é\nAssistant:", "Assistant: Good\n<|endoftext|>"], [" Good\n<|endoftext|>"]),
        (
            "gemma",
            ["<bos><start_of_turn>user\nAsk é<end_of_turn>\n<start_of_turn>model\n",
             "<start_of_turn>model\nGood<end_of_turn>\n<|endoftext|>"],
            ["Good<end_of_turn>", "<|endoftext|>"],
        ),
        (
            "{% for m in messages %}[{{ m.role }}]{{ m.content }};{% endfor %}"
            "{% if add_generation_prompt %}[assistant]{% endif %}",
            ["[user]Ask é;[assistant]", "assistant]Good;<|endoftext|>"],  # ;[ is one token
            ["Good;<|endoftext|>"],
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("lowercase", [False, True])
def test_a_message_of_weight_0_is_read_and_none_of_its_tokens_is_learned(
    name: str, everything: list[str], answers: list[str], lowercase: bool
) -> None:
    source = templates()[name].text if name in templates() else name
    tags = Template(source).tags
    words = ["user\nassistant\nmodel\nUser: Assistant: Bad Good Ask More é;[]\n"] * 9
    tokenizer = train(words, 320, lowercase=lowercase, tags=tags)

    def learned_texts(chat: list[dict[str, Any]], answers_only: bool) -> list[str]:
        text = Template(source, None, None, answers_only).render({"messages": chat})
        one = encode(tokenizer, [text], answers_only)[0]
        groups = itertools.groupby(one.tokens, lambda token: bool(token >= 0))
        return [tokenizer.decode(list(tokens)) for is_learned, tokens in groups if is_learned]

    def cased(texts: list[str]) -> list[str]:
        return [text.lower() for text in texts] if lowercase else texts

    assert learned_texts(UNWANTED, False) == cased(everything)
    assert learned_texts(UNWANTED, True) == cased(answers)
    assert learned_texts(UNWANTED[:2], False) == cased(everything[:1])
    assert learned_texts(UNWANTED[:2], True) == []
    named: list[dict[str, Any]] = [
        {**{k: v for k, v in m.items() if k != "weight"}, field: bool(m.get("weight", 1))}
        for m, field in zip(UNWANTED, ("train", "training", "train", "training"), strict=True)
    ]
    assert learned_texts(named, False) == cased(everything)


@pytest.mark.parametrize(("largest", "dtype"), [(32_766, np.int16), (32_767, np.int32)])
def test_marks_fit_into_the_type(largest: int, dtype: Any) -> None:
    assert marked_dtype(largest) is dtype
    assert ids(np.array([~largest], dtype)).tolist() == [largest]
    assert ~largest > np.iinfo(dtype).min


# packing


@given(st.lists(st.integers(0, 40), max_size=30), st.integers(2, 16))
def test_a_document_that_fits_is_never_cut_and_every_target_occurs_once(
    lengths: list[int], row_tokens: int
) -> None:
    rows = placed(lengths, row_tokens)
    targets: Counter[tuple[int, int]] = Counter()
    for row in rows:
        assert 0 < sum(p.stop - p.start for p in row) <= row_tokens
        for number, start, stop in row:
            if lengths[number] <= row_tokens:
                assert (start, stop) == (0, lengths[number])
            targets.update((number, place) for place in range(start + 1, stop))
    assert targets == Counter((n, p) for n, length in enumerate(lengths) for p in range(1, length))
    tokens = [np.full(length, n % 99, np.int16) for n, length in enumerate(lengths)]
    flat = laid(tokens, rows, row_tokens)
    assert len(flat) == len(rows) * row_tokens
    kept = [trimmed(flat[i : i + row_tokens]).tolist() for i in range(0, len(flat), row_tokens)]
    for found, row in zip(kept, rows, strict=True):
        assert [~n if n < 0 else n for n in found] == [
            n % 99 for n, a, b in row for _ in range(a, b)
        ]
        ends = np.cumsum([0, *(p.stop - p.start for p in row)])[:-1].tolist()
        continued = {at for at, piece in zip(ends, row, strict=True) if at and piece.start}
        assert {at for at, n in enumerate(found) if n < 0} == continued, "a target once"


def test_records_without_text_give_no_tokens_and_no_rows(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    path = write(tmp_path / "made.jsonl", [{"text": text} for text in ("", "one more", "")])
    settings = {"data.source": str(path), "data.template": "{{ text }}"}
    source = open_source(replace(Plan(), settings), 1024)
    blocks = RecordBlocks(source, split_of(source, 0.0), tokenizer, 8, False)
    assert trimmed(blocks.block(0)).tolist() == tokenizer.encode(["one more"]).tolist()
    write(path, [{"text": ""}] * 3)
    empty = open_source(replace(Plan(), settings), 1024)
    assert not len(RecordBlocks(empty, split_of(empty, 0.0), tokenizer, 8, False).block(0))
    assert not len(held_out_records(empty, Everything(3), tokenizer, 8, False))


@pytest.mark.parametrize("streaming", [False, True])
def test_data_of_which_nothing_is_learned_are_refused(
    streaming: bool, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    asked = {"messages": [{"role": "user", "content": "one more"}]}
    path = write(tmp_path / "asked.jsonl", [asked] * 9)
    settings = {"data.source": str(path), "data.template": "plain", "data.loss_on": "answers"}
    settings |= {"data.streaming": streaming, "data.sequence_length": 8}
    part = alone(replace(Plan(), settings), open_source(replace(Plan(), settings), 1024)).first

    def prepared(part: TextPart) -> Portion:
        cache = tmp_path / "counts.json"
        model = catalog.architecture(Plan())
        return prepare_part(part, model, tokenizer, frozenset(), cache, lambda: None, print)

    with pytest.raises(DataError) as error:
        prepared(part)
    words = "hold no answer, and data.loss_on = answers learns nothing else; expected messages of"
    assert str(error.value).startswith(f"{path}: the train documents {words}")
    whole = replace(part.plan, {"data.loss_on": "all"})
    assert prepared(dataclasses.replace(part, plan=whole)).counts.any()
    answer = {"role": "assistant", "content": "Yo", "train": False}
    write(path, [{"messages": [*asked["messages"], answer]}] * 9)
    marked = alone(part.plan, open_source(part.plan, 1024)).first
    words = (
        r"the answers of the train documents are marked as not learned \(weight, train, training"
    )
    with pytest.raises(DataError, match=words):
        prepared(marked)


@pytest.mark.parametrize("kept", [False, True])
def test_a_run_counts_the_records_whose_reasoning_or_tools_are_not_written(
    kept: bool, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(token_key, "LEAST_BYTES", 0 if kept else 1 << 20)
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]
    thought = [chat[0], {**chat[1], "reasoning_content": "Hm."}]
    rows: list[Any] = [{"messages": chat}] * 4 + [{"messages": thought}] * 3
    path = write(
        tmp_path / "chats.jsonl", [*rows, {"messages": thought, "tools": [{"name": "add"}]}]
    )
    settings = {"data.source": str(path), "data.template": "plain", "data.validation_fraction": 0.0}
    plan = replace(Plan(), {**settings, "data.sequence_length": 32})
    for number in range(2):
        part = alone(plan, open_source(plan, 1024)).first
        model, counts = catalog.architecture(Plan()), tmp_path / f"counts-{number}.json"
        found = prepare_part(part, model, tokenizer, frozenset(), counts, lambda: None, print)
        assert found.warnings == (
            'data.template = "plain": 1 of 8 records have tools that the template leaves out',
            'data.template = "plain": 4 of 8 records have reasoning (reasoning_content, reasoning, thinking) that the '
            "template leaves out",
        )


@pytest.mark.parametrize("kept", [False, True])
def test_a_run_counts_the_records_with_messages_of_other_roles(
    kept: bool, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(token_key, "LEAST_BYTES", 0 if kept else 1 << 20)
    chat = [{"from": "human", "value": "Hi"}, {"from": "bing", "value": "Yo"}]
    others = [{"from": role, "value": "7"} for role in ("observation", "owl", "narrator", "tool")]
    rows = [{"conversations": chat}] * 4 + [{"conversations": [*chat, *others]}] * 3
    path = write(tmp_path / "chats.jsonl", [*rows, {"conversations": [*chat, others[2]]}])
    template = (
        "{% for m in messages if m.role[0] != 'o' %}{{ m.role }} {{ m.content }} {% endfor %}"
    )
    settings = {"data.source": str(path), "data.template": template, "data.loss_on": "answers"}
    plan = replace(
        Plan(), {**settings, "data.validation_fraction": 0.0, "data.sequence_length": 64}
    )
    for number in range(2):
        part = alone(plan, open_source(plan, 1024)).first
        model, counts = catalog.architecture(Plan()), tmp_path / f"counts-{number}.json"
        found = prepare_part(part, model, tokenizer, frozenset(), counts, lambda: None, print)
        assert [words.partition('}": ')[2] for words in found.warnings] == [
            "3 of 8 records have messages of roles observation, owl that the template leaves out",
            "4 of 8 records have messages of role narrator that the template does not know and writes as they are; "
            "expected system, user, assistant, tool",
        ]


def test_answers_after_a_cut_are_counted() -> None:
    read, learnt = [~1] * 6, [1] * 6
    rows = [read + learnt, learnt + read, read[:3] + learnt[:3]]
    found = cuts([np.array(row, np.int16) for row in rows], 6)
    assert found == Cuts(documents=3, cut=2, answers_cut=1, longest=12)
    more = Cuts(documents=1, cut=1, answers_cut=0, longest=40)
    assert found.joined(more) == Cuts(documents=4, cut=3, answers_cut=1, longest=40)


def test_rows_of_records_hold_whole_records_and_resume_exactly(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    source = documents(write(tmp_path / "made.jsonl", MADE))
    split = split_of(source, 0.1)
    blocks = RecordBlocks(source, split, tokenizer, 160, True)
    shape = BatchShape(2, 3, 160)
    assert tokenizer.end_of_text is not None
    between = Boundary(tokenizer.end_of_text, opens=False)
    texts = [t for i, t in enumerate(source.read(0, 400)) if not split.held_out(i, i + 1)[0]]
    wanted = Counter(
        (tuple(ids(one.tokens)[:-1].tolist()), tuple(learned(one.tokens).tolist()))
        for one in encode(tokenizer, texts, True)
    )

    def batches(state: Any, count: int) -> list[Any]:
        stream = BatchStream(TextRows(blocks, 5, 16, boundary=between), shape, state)
        found = [stream.next() for _ in range(count)]
        stream.close()
        return found

    found = batches(None, 70)
    epoch = list(itertools.takewhile(lambda item: item.batch is not None, found))
    assert len(epoch) < 70
    seen: Counter[Any] = Counter()
    for item in epoch:
        rows = (item.batch[name].reshape(6, 160) for name in ("inputs", "targets", "documents"))
        for inputs, targets, numbers in zip(*rows, strict=True):
            for number in np.unique(numbers):
                read, aims = inputs[numbers == number], targets[numbers == number]
                body = tuple(read[read != tokenizer.end_of_text].tolist())
                if body:
                    seen[body, tuple(aims[aims != MASKED].tolist())] += 1
    assert seen == wanted
    for position in (1, 7, len(epoch) - 1):
        state = json.loads(json.dumps(found[position].state))
        for item, again in zip(found[position + 1 :], batches(state, 69 - position), strict=True):
            assert item.state == again.state
            if item.batch is not None:
                assert all((item.batch[n] == again.batch[n]).all() for n in item.batch.arrays)


def test_turns_that_end_like_documents_cannot_be_isolated(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    path = write(tmp_path / "chats.jsonl", [{"prompt": "Hi <|endoftext|>", "completion": "Yo"}] * 4)

    def block(template: str) -> Any:
        source = open_source(
            replace(Plan(), {"data.source": str(path), "data.template": template}), 700
        )
        split = split_of(source, 0.0)
        assert tokenizer.end_of_text is not None
        between = Boundary(tokenizer.end_of_text, opens=False)
        return RecordBlocks(source, split, tokenizer, 40, True, between).block(0)

    turns = "{% for m in messages %}{{ m.content }}END{% endfor %}"
    assert (ids(block(turns.replace("END", "."))) == tokenizer.end_of_text).sum() == 4
    with pytest.raises(PlanError, match=r"isolate_documents = true: .* <\|endoftext\|> within"):
        block(turns.replace("END", "<|endoftext|>"))


def test_held_out_answers_cover_the_bytes_of_their_text(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    source = documents(write(tmp_path / "made.jsonl", MADE))
    split = split_of(source, 0.1)
    held = held_out_records(source, split, tokenizer, 160, True)
    shape = BatchShape(1, 4, 160)
    texts = [source.read(i, i + 1)[0] for i in np.flatnonzero(split.held_out(0, 400))]
    wanted = 0
    for text in texts:
        assert isinstance(text, Rendered)
        wanted += sum(len(text[a:b].encode()) for a, b in text.answers)
    assert held.target_bytes(shape, 0) == wanted


# simple answers


def test_f1_is_that_of_bags_of_words() -> None:
    assert f1(["a", "b", "c"], ["b", "c", "d", "e"]) == pytest.approx(2 * (2 / 4) * (2 / 3) / (2 / 4 + 2 / 3))  # fmt: skip
    assert f1(["a", "a"], ["a"]) == pytest.approx(2 / 3)
    found = scores([{"x": "A  b", "y": "c"}], [{"x": "a B", "y": "d"}])
    assert found == {
        "exact_match": 0.5, "token_f1": 0.5, "exact_match_x": 1.0, "token_f1_x": 1.0,
        "exact_match_y": 0.0, "token_f1_y": 0.0,
    }  # fmt: skip


def test_the_nearest_text_is_that_of_the_largest_cosine() -> None:
    texts = [str(EQUIPMENT.question(one).prompt) for one in MADE[:60]]
    known, asked = texts[:50], texts[50:]
    words = [Counter(text.lower().split()) for text in known]
    idf = {w: math.log(50 / sum(w in c for c in words)) + 1 for c in words for w in c}

    def cosine(one: Counter[str], other: Counter[str]) -> float:
        norm = math.sqrt(sum((c * idf[w]) ** 2 for w, c in other.items()))
        return sum(one[w] * other[w] * idf.get(w, 0.0) ** 2 for w in one) / norm

    near = Nearest(known)
    for text in asked:
        counts = Counter(text.lower().split())
        assert near.of(text) == int(np.argmax([cosine(counts, other) for other in words]))


def test_baselines_of_made_records_leave_much_to_learn() -> None:
    rows = [Record(str(i), one) for i, one in enumerate(MADE)]
    found = held_records(EQUIPMENT, rows[:40], rows[40:]).baselines
    assert found["frequent_exact_match"] < 0.05
    assert found["nearest_exact_match_solution"] < 0.2
    assert 0.2 < found["nearest_token_f1"] < 0.95


def test_asked_and_known_records_are_spread_over_the_data(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = sorted(MADE, key=lambda one: str(one["equipment"]))
    plan = replace(catalog.preset("gearhead-small"), {"train.answered_records": 8})
    model = catalog.architecture(plan)
    known: list[int] = []

    def noticed(template: Template, held: Any, train: list[Record]) -> Any:
        known[:] = [rows.index(one.fields) for one in train]
        return held_records(template, held, train)

    monkeypatch.setattr(answering, "held_records", noticed)
    monkeypatch.setattr(answering, "BASELINE_RECORDS", 40)
    lines = documents(write(tmp_path / "sorted.jsonl", rows))
    stream = StreamRecords(rows, EQUIPMENT, "hf://some/records", None)
    for source, spread in ((lines, True), (stream, False)):
        opened = alone(plan, source, split_of(source, 0.1))
        found = asked_records(plan, model, opened, tokenizer)
        assert found is not None
        asked = [rows.index(one.fields) for one in found.held.records]
        split = opened.first.split
        assert len(asked) == 8
        assert all(split.held_out(i, i + 1)[0] for i in asked)
        assert not any(split.held_out(i, i + 1)[0] for i in known)
        for numbers in (asked, known):
            assert numbers == sorted(numbers)
            assert (max(np.diff(numbers)) < 120 and numbers[-1] > 300) == spread
        assert len({rows[i]["equipment"] for i in asked}) > 4 or not spread


def test_an_answer_without_a_control_token_at_its_end_learns_to_stop() -> None:
    """What stands between the answer and the end-of-text token is learned, because the model has to write it."""
    source = "{{ q }}:{% generation %} {{ a }}{% endgeneration %}{{ '\\n\\n' }}"
    tokenizer = train(["two: three\n\n"] * 9, 300)
    text = Template(source).render({"q": "two", "a": "three"})
    tokens = encode(tokenizer, [text], True)[0].tokens
    first = int(np.flatnonzero(tokens >= 0)[0])
    assert (tokens[first:] >= 0).all()
    assert tokens[-1] == tokenizer.end_of_text
    assert tokenizer.decode(ids(tokens[first:]).tolist()).startswith(" three\n\n")


@pytest.mark.parametrize("source", [
    "{{ q }} -> {% generation %}{{ a }}{% endgeneration %}",
    "{{ q }} ->{% generation %} {{ a }}{% endgeneration %}",
    "{{ q }}\n{% generation %}{{ a }}{% endgeneration %}",
])  # fmt: skip
def test_a_question_is_tokenized_as_the_beginning_of_its_record(source: str) -> None:
    tokenizer = train(["two -> three", "two\nthree"] * 9, 320)
    template = Template(source)
    whole = ids(encode(tokenizer, [template.render({"q": "two", "a": "three"})], True)[0].tokens)
    question = answering.prompt_ids(tokenizer, template.question({"q": "two"}))
    assert whole[: len(question)].tolist() == question
    assert "three" not in tokenizer.decode(question)


def test_an_answer_in_a_prompt_that_ends_with_a_space_has_no_second_one() -> None:
    tokenizer = train(["two -> three"] * 9, 300)
    template = Template("{{ q }} -> {% generation %}{{ a }}{% endgeneration %}")

    class Model:
        def generate(self, prompt: list[int], tokens: int, sampling: Any) -> list[int]:
            return tokenizer.prompt("two -> three")[len(prompt) :]

    asker = answering.Answerer(template, tokenizer, 9, 64)
    found = asker.answer(Model(), Record("here", {"q": "two"}))  # type: ignore[arg-type]
    assert (found.prompt, found.text, found.answers) == ("two -> ", "three", {"a": "three"})


def test_a_stop_token_that_the_template_writes_more_after_is_no_part_of_an_answer() -> None:
    source = (
        "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}{% generation %}"
        "{{ m.content }}<|end|>{% endgeneration %}{% else %}{{ m.content }}<|end|>{% endif %}\n"
        "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% else %}<|stop|>{% endif %}"
    )
    template = Template(source)
    tokenizer = train(["hello there"] * 9, 320, tags=template.tags)
    given: list[int] = []

    class Model:
        def generate(self, prompt: list[int], tokens: int, sampling: Sampling) -> list[int]:
            given.extend(sampling.stop)
            return tokenizer.encodings(["hello<|end|>"], controls=True)[0].ids

    asker = answering.Answerer(template, tokenizer, 9, 64)
    chat = {"messages": [{"role": "user", "content": "there"}]}
    found = asker.answer(Model(), Record("here", chat))  # type: ignore[arg-type]
    assert tokenizer.decode(given[-1:]) == "<|end|>"
    assert found.answers == {"answer": "hello"} == {"answer": found.text}


@pytest.mark.parametrize("more", [
    {"content": None, "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]},
    {"content": "3", "reasoning_content": "One and two."},
])  # fmt: skip
def test_an_answer_of_which_the_content_is_a_part_is_not_scored(more: dict[str, Any]) -> None:
    source = "{% for m in messages %}{{ m.role }}:{{ m.content }}{{ m.tool_calls }}{{ m.reasoning_content }}\n{% endfor %}"
    template = Template(source, of_model=True)
    asked = {"role": "user", "content": "What?"}
    assert template.answers({"messages": [asked, {"role": "assistant", "content": "3"}]})
    assert template.answers({"messages": [asked, {"role": "assistant", **more}]}) == {}


def test_the_beginning_of_a_message_that_a_template_marks_as_learned_is_given() -> None:
    """As in the template of SmolLM3."""
    source = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}"
        "{{ '<|im_start|>assistant\n' + m.content + '<|im_end|>\n' }}{% endgeneration %}"
        "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    question = Template(source).question({"messages": [{"role": "user", "content": "Hi"}]})
    assert question.prompt == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert question.parse("Hello<|im_end|>\n") == {"answer": "Hello"}
