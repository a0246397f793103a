"""Templates: what they write, which parts are answers, and what a plan may not ask of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jinja2
import pytest

from memconsole.plan.check import check
from memconsole.plan.data.unwritten import unwritten_notes
from memconsole.plan.plan import Plan, PlanError, replace
from memconsole.plan.templates import limits
from memconsole.plan.templates.chat import RecordError, messages_of
from memconsole.plan.templates.choice import template_of, templates
from memconsole.plan.templates.rendered import Rendered
from memconsole.plan.templates.template import Template

RECORD = {
    "equipment": "Kestrel 320",
    "symptom": "stalls",
    "codes": ["SPN 157", "FMI 3"],
    "cause": "bad pump",
    "solution": "swap it",
}
CHAT = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "Name?"},
        {"role": "assistant", "content": "Bot"},
    ]
}


def named(name: str) -> Template:
    return Template(templates()[name].text)


def answers(text: Rendered) -> list[str]:
    return [text[start:stop] for start, stop in text.answers]


def test_an_equipment_record_is_written_as_documented_and_cause_and_solution_are_answers() -> None:
    text = named("equipment").render(RECORD)
    assert text == (
        "<equipment> Kestrel 320\n<symptom> stalls\n<error> SPN 157, FMI 3\n"
        "<cause> bad pump\n<solution> swap it"
    )
    assert answers(text) == [" bad pump\n<solution> swap it"]
    assert text.ends_with_answer
    without = named("equipment").render({**RECORD, "codes": []})
    assert without == text.replace("<error> SPN 157, FMI 3\n", "")
    assert named("equipment").render({k: v for k, v in RECORD.items() if k != "codes"}) == without


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        (
            "plain",
            "System: Be brief.\nUser: Hi\nAssistant: Hello\nUser: Name?\nAssistant: Bot\n",
            [" Hello", " Bot"],
        ),
        (
            "chatml",
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
            "<|im_start|>assistant\nHello<|im_end|>\n<|im_start|>user\nName?<|im_end|>\n"
            "<|im_start|>assistant\nBot<|im_end|>\n",
            ["Hello<|im_end|>", "Bot<|im_end|>"],
        ),
        (
            "llama-3",
            "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\nHello<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\nName?<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\nBot<|eot_id|>",
            ["Hello<|eot_id|>", "Bot<|eot_id|>"],
        ),
        (
            "gemma",
            "<bos><start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n"
            "<start_of_turn>model\nHello<end_of_turn>\n<start_of_turn>user\nName?<end_of_turn>\n"
            "<start_of_turn>model\nBot<end_of_turn>\n",
            ["Hello<end_of_turn>", "Bot<end_of_turn>"],
        ),
    ],
)
def test_a_chat_is_written_as_its_family_writes_it(name: str, text: str, said: list[str]) -> None:
    found = named(name).render(CHAT)
    assert found == text
    assert answers(found) == said
    question = named(name).question(CHAT)
    assert text.startswith(question.prompt)
    assert question.parse(text[len(question.prompt) :]) == {"answer": "Bot"}


def test_the_answers_of_a_template_without_marks_are_what_the_assistant_adds() -> None:
    plain = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}[end]{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    assert answers(Template(plain).render(CHAT)) == ["Hello[end]", "Bot[end]"]
    forgets = "{% for m in messages[-2:] %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    with pytest.raises(RecordError, match=r"does not write messages\[2\] in one piece"):
        Template(forgets).render(CHAT)


def test_a_template_may_ask_for_tools_as_those_of_transformers_do() -> None:
    asks = (
        "{% if tools is not none %}{{ tools | tojson }}\n{% endif %}"
        "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
    )
    chat = {"prompt": "Hi", "completion": "Yo"}
    assert Template(asks).render(chat) == "user: Hiassistant: Yo"
    tools = [{"name": "<add>"}]
    text = Template(asks).render({**chat, "tools": tools})
    assert text.startswith('[{"name": "<add>"}]\nuser')
    assert Template(asks).render({**chat, "tools": json.dumps(tools)}) == text
    assert Template(asks).render({**chat, "tools": ""}) == "user: Hiassistant: Yo"
    for wrong, words in (
        ("add", "text that is no JSON list"),
        ('{"name": "add"}', "an object, expected a list of tools"),
        ({"name": "add"}, "an object, expected a list of tools"),
    ):
        with pytest.raises(RecordError, match=f'field "tools" holds {words}'):
            Template(asks).render({**chat, "tools": wrong})


def test_every_layout_of_a_chat_is_the_same_chat() -> None:
    turns = [("human", "Hi"), ("gpt", "Hello")]
    layouts: list[dict[str, Any]] = [
        {"conversations": [{"from": role, "value": text} for role, text in turns]},
        {"prompt": "Hi", "completion": "Hello"},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]},
                      {"role": "assistant", "content": "Hello", "tool_calls": None}]},
    ]  # fmt: skip
    wanted = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    assert [messages_of(layout) for layout in layouts] == [wanted] * 3


def test_the_system_field_of_a_record_is_the_first_message() -> None:
    system, *said = CHAT["messages"]
    for layout in ({"messages": said}, {"conversations": said}):
        given = {**layout, "system": "Be brief."}
        assert messages_of(given) == CHAT["messages"]
        assert named("chatml").render(given) == named("chatml").render(CHAT)
    assert messages_of({**CHAT, "system": "Be long."}) == CHAT["messages"]
    asked = {"prompt": "Hi", "completion": "Yo", "system": "Be brief."}
    assert messages_of(asked)[0] == system
    assert named("gemma").question(asked).prompt.startswith("<bos><start_of_turn>user\nBe brief.")
    for nothing in (None, ""):
        assert messages_of({"messages": said, "system": nothing}) == said
    with pytest.raises(RecordError, match='field "system" holds an object, expected text'):
        messages_of({"messages": said, "system": {}})


TOLD = {
    "messages": [
        {"role": "user", "content": "Add."},
        {"role": "assistant", "content": "Two.", "reasoning_content": "1 + 1"},
    ]
}
CALLED = {
    "messages": [
        {"role": "user", "content": "Add."},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add"}}]},
    ]
}


def test_calls_of_tools_that_a_template_does_not_write_are_refused() -> None:
    words = r"^has calls of tools \(tool_calls, function_call\), which the template does not write; use data\.template = model"
    for name in ("plain", "chatml", "llama-3", "gemma"):
        with pytest.raises(RecordError, match=words):
            named(name).render(CALLED)
        old = {"role": "assistant", "content": "", "function_call": {"name": "add"}}
        with pytest.raises(RecordError, match=words):
            named(name).render({"messages": [*CALLED["messages"][:1], old]})
    loop = "{% for m in messages %}{{ m.content }}HERE{% endfor %}"
    with pytest.raises(RecordError, match=r"does not write; use a template that writes them$"):
        Template(loop.replace("HERE", ""), of_model=True).render(CALLED)
    for written in ("{{ m['tool_calls'] }}", "{{ m | tojson }}"):
        source = loop.replace("HERE", written)
        assert "add" in Template(source, learns_answers=False, of_model=True).render(CALLED)
    none = [{**message, "tool_calls": []} for message in CHAT["messages"]]
    assert named("chatml").render({"messages": none}) == named("chatml").render(CHAT)


def test_tools_and_reasoning_that_a_template_does_not_write_are_told() -> None:
    assert named("chatml").render(TOLD).unwritten == ("reasoning",)
    assert named("chatml").render({**TOLD, "tools": [{"name": "add"}]}).unwritten == (
        "tools",
        "reasoning",
    )
    assert (
        named("chatml")
        .render({**CHAT, "tools": [], "chat_template_kwargs": {"thinking": True}})
        .unwritten
        == ()
    )
    loop = "{% for m in messages %}{{ m.content }}HERE{% endfor %}"
    for written in ("{{ m.reasoning_content or '' }}", "{{ m | tojson }}"):
        assert Template(loop.replace("HERE", written), of_model=True).render(TOLD).unwritten == ()
    assert Template(loop.replace("HERE", ""), of_model=True).render(TOLD).unwritten == (
        "reasoning",
    )


def test_plan_tells_of_the_first_record_what_train_would_tell_of_all(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps(CALLED) + "\n")
    with pytest.raises(
        PlanError, match=r"chats\.jsonl: line 1 has calls of tools .*; use data\.template = model"
    ):
        check(plan(path, template="chatml"))
    path.write_text(json.dumps(TOLD) + "\n")
    check(plan(path, template="chatml"))
    assert [note.words for note in unwritten_notes(plan(path, template="chatml"))] == [
        'data.template = "chatml": the first record has reasoning (reasoning_content, reasoning, thinking) that the '
        "template leaves out"
    ]
    assert unwritten_notes(plan(path)) == ()
    path.write_text(json.dumps(CHAT) + "\n")
    assert unwritten_notes(plan(path, template="chatml")) == ()


def test_other_names_of_roles_are_known() -> None:
    for user, assistant in (("human", "bing"), ("prompter", "bard"), ("user", "model")):
        chat = [{"from": user, "value": "Hi"}, {"from": assistant, "value": "Yo"}]
        text = named("chatml").render({"conversations": chat})
        assert answers(text) == ["Yo<|im_end|>"]
        assert "<|im_start|>user\nHi" in text
    roles = [{"role": role, "content": "Be brief."} for role in ("developer", "system")]
    one, other = ({"messages": [first, *CHAT["messages"][1:]]} for first in roles)
    assert named("gemma").render(one) == named("gemma").render(other)
    knows = "{% for m in messages if m.role == 'developer' %}{{ m.content }}{% endfor %}"
    assert Template(knows).render(one) == "Be brief."


def test_plan_tells_the_roles_of_the_first_chat_that_are_left_out_or_not_known(
    tmp_path: Path,
) -> None:
    path = tmp_path / "chats.jsonl"
    chat = [*CHAT["messages"], {"role": "observation", "content": "7"}]
    path.write_text(json.dumps({"messages": chat}) + "\n")
    (note,) = unwritten_notes(plan(path, template="chatml"))
    assert "has messages of role observation that the template does not know" in note.words
    some = "{% for m in messages if m.role in ('user', 'assistant') %}{{ m.content }}{% endfor %}"
    (note,) = unwritten_notes(plan(path, template=some))
    assert note.words.endswith(
        "the first record has messages of role observation that the template leaves out"
    )


def of_weight(weight: Any, number: int = -1) -> dict[str, Any]:
    """`CHAT` with this weight of a message."""
    chat = [dict(message) for message in CHAT["messages"]]
    chat[number]["weight"] = weight
    return {"messages": chat}


def test_a_message_of_weight_0_is_no_answer() -> None:
    for name in ("plain", "chatml", "llama-3", "gemma"):
        whole = named(name).render(CHAT)
        for number, answer in ((2, 0), (4, 1)):
            text = named(name).render(of_weight(0, number))
            assert text == whole
            assert text.answers == whole.answers[1 - answer : 2 - answer]
            ((start, stop),) = text.only_read
            assert text[start:stop].strip() == answers(whole)[answer].strip()
        assert not named(name).render(of_weight(0)).ends_with_answer
        assert named(name).render(of_weight(1)).only_read == ()
    assert named("plain").answers(of_weight(0)) == {}
    assert named("plain").answers(of_weight(1)) == {"answer": "Bot"}
    with pytest.raises(RecordError, match=r'"messages\[4\]" has a "weight" other than 0, 1, true'):
        named("plain").render(of_weight(0.5))
    last = "{% for m in messages[-1:] %}{{ m.content }}{% endfor %}"
    with pytest.raises(RecordError, match=r"messages\[1\] in one piece, so that it cannot be left"):
        Template(last, learns_answers=False).render(of_weight(0, 1))


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"text": "x"}, "is no chat: it has text"),
        ({"messages": []}, 'field "messages" holds an empty list'),
        ({"messages": "Hi"}, 'field "messages" holds text that is no JSON list'),
        ({"messages": ""}, 'field "messages" holds nothing, expected a list of messages'),
        ({"messages": ["x"]}, r'field "messages\[0\]" holds text, expected a message'),
        ({"messages": [{"content": "x"}]}, r'field "messages\[0\]" has no "role"'),
        ({"messages": [{"role": "user", "content": 7}]}, r'"messages\[0\]" has no "content"'),
    ],
)
def test_what_is_no_chat_is_refused_by_field(record: dict[str, Any], words: str) -> None:
    with pytest.raises(RecordError, match=words):
        named("chatml").render(record)


def test_a_record_without_a_field_that_is_written_is_refused_by_name() -> None:
    with pytest.raises(RecordError, match='has no field "symptom"'):
        named("equipment").render({k: v for k, v in RECORD.items() if k != "symptom"})
    assert named("equipment").needed == ("equipment", "symptom", "cause", "solution")
    with pytest.raises(RecordError, match="has an object where the template writes text"):
        named("equipment").render({**RECORD, "cause": {"a": 1}})


@pytest.mark.parametrize(
    ("name", "record", "words"),
    [
        ("equipment", {**RECORD, "symptom": None}, 'field "symptom" is null'),
        ("prompt", {"prompt": "Hi", "completion": None}, 'field "completion" is null'),
        ("chatml", {"prompt": "Hi", "completion": None}, 'field "completion" is null'),
        ("chatml", {"messages": None, "text": "x"}, 'field "messages" is null'),
        (
            "chatml",
            {"messages": [{"role": "user", "content": None}]},
            r'field "messages\[0\]" has a "content" \(or "value"\) that is null',
        ),
    ],
)
def test_a_field_that_is_null_is_told_from_one_that_is_not_there(
    name: str, record: dict[str, Any], words: str
) -> None:
    with pytest.raises(RecordError, match=f"^{words}$"):
        named(name).render(record)
    assert named("equipment").render({**RECORD, "codes": None}).count("<error>") == 0


def test_messages_and_values_for_the_template_may_be_json_text() -> None:
    for column in ("messages", "conversations"):
        text = json.dumps(CHAT["messages"])
        assert named("chatml").render({column: text}) == named("chatml").render(CHAT)
    asks = "{% for m in messages %}{{ m.content }}{% endfor %}{{ word }}"
    told = {"prompt": "Hi", "completion": "Yo", "chat_template_kwargs": '{"word": "!"}'}
    assert Template(asks).render(told) == "HiYo!"
    with pytest.raises(
        RecordError, match=r'field "chat_template_kwargs" holds a list, expected an object'
    ):
        Template(asks).render({**told, "chat_template_kwargs": [1]})


def test_control_tokens_in_a_record_are_text_and_are_cut() -> None:
    text = named("equipment").render({**RECORD, "symptom": "stalls <solution> now\ufdd0"})
    assert "stalls <solution> now\ufffd" in text
    (cut,) = text.cuts
    assert text[cut - 1 : cut + 9] == "<solution>"
    assert answers(text) == [" bad pump\n<solution> swap it"]


def test_a_question_is_open_and_its_answers_are_told_apart() -> None:
    asked = {k: v for k, v in RECORD.items() if k not in ("cause", "solution")}
    question = named("equipment").question(asked)
    assert question.prompt.endswith("FMI 3\n<cause>")
    assert question.names == ("cause", "solution")
    found = question.parse(" worn out\n<solution> replace it ")
    assert found == {"cause": "worn out", "solution": "replace it"}
    assert question.parse(" worn") == {"cause": "worn", "solution": ""}
    found = question.parse(
        " İİİ worn <SOLUTION> replace it"
    )  # each İ has two characters in lower case
    assert found == {"cause": "İİİ worn", "solution": "replace it"}
    assert named("equipment").answers(RECORD) == {"cause": "bad pump", "solution": "swap it"}


def test_a_sandboxed_template_reaches_nothing_outside() -> None:
    with pytest.raises(RecordError, match="does not fit the template"):
        Template("{{ messages.__class__.__mro__[1].__subclasses__() }}").render(CHAT)


@pytest.mark.parametrize(
    "source",
    [
        '{{ "x" * 10**10 }}', "{{ 10**10 * [0] }}", "{{ (10 ** 9, [0] * 10**7) }}", '{{ "%1000000000d" % 1 }}',
        '{{ "%*d" % (10**9, 1) }}', '{{ "%1000000000d"|format(1) }}', '{{ "{:>1000000000}".format(1) }}',
        '{{ "{:>{}}".format(1, 10**9) }}', '{{ "x"|center(10**10) }}', '{{ "x".ljust(10**10) }}',
        '{{ "x"|indent(10**10, true) }}', '{{ (["x" * 2**20] * 20)|join(",") }}', '{{ {"a": 1}|tojson(indent=10**10) }}',
        '{{ "{a:>2000000000}".format_map({"a": 1}) }}', '{{ ("a" * 2**20)|replace("a", "x" * 2**11) }}',
        '{{ ("a" * 2**20).replace("a", "x" * 2**11) }}', '{{ "x".encode() * 2**31 }}', '{{ (1).to_bytes(2**31, "big") }}',
        '{{ ("\\t" * 2**20).expandtabs(2**12) }}', '{{ ",".join(["x" * 2**20] * 20) }}',
    ],
)  # fmt: skip
def test_a_short_template_that_writes_gigabytes_is_refused(source: str) -> None:
    with pytest.raises(RecordError, match="does not fit the template: it would write more than 16"):
        Template(source).render({})


@pytest.mark.parametrize(
    "source",
    [
        "{% set ns = namespace(a='x' * 999) %}" + "{% set ns.a = ns.a ~ ns.a %}" * 27,
        "{% set ns = namespace(a='x' * 999) %}" + "{% set ns.a = ns.a + ns.a %}" * 27,
        "{% set ns = namespace(a=[1]) %}" + "{% set ns.a = ns.a * 9 + ns.a %}" * 27,
        "{{ [1]|batch(10**9, 1)|list }}", "{{ [1]|slice(10**9)|list }}", "{{ [[1] * 999]|tojson(indent=10**5) }}",
        "{{ ('x ' * 9999)|wordwrap(1, wrapstring='y' * 9999) }}", "{{ ('x' * 10**6).join('a' * 10**6) }}",
        "{{ ('x' * 10**6).translate({120: 'y' * 10**6}) }}", "{{ ('%(a)s' * 10**4) % {'a': 'x' * 10**6} }}",
        "{{ ('ab' * 10**6)|sort|length }}", "{{ ('ab' * 10**6)|groupby('x')|length }}", "{{ ('ab' * 10**6)|unique|first }}",
        "{{ ('{0}' * 10**5).format('x' * 10**6) }}", "{{ ('%(a)s' * 10**4)|format(a='x' * 10**6) }}",
    ],
)  # fmt: skip
def test_text_and_lists_that_grow_step_by_step_are_refused(source: str) -> None:
    with pytest.raises(RecordError, match="does not fit the template: it would write more than 16"):
        Template(source, of_model=True).render({})


@pytest.mark.parametrize(
    ("made", "written"),
    [
        ("[ns.a, ns.a]", "{{ ns.a }}"),
        ("(ns.a, ns.a)", "{{ ns.a ~ 1 }}"),
        ("{1: ns.a, 2: ns.a}", "{{ ns.a|tojson }}"),
        ("namespace(x=ns.a, y=ns.a)", "{{ ns.a }}"),
    ],
)
def test_a_list_that_holds_itself_many_times_is_refused(
    made: str, written: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MOST_CHARACTERS", 1 << 20)
    source = "{% set ns = namespace(a=[1]) %}" + f"{{% set ns.a = {made} %}}" * 40 + written
    with pytest.raises(RecordError, match="does not fit the template: it would write more than 1 "):
        Template(source, of_model=True).render({})


@pytest.mark.parametrize(
    "source",
    [
        "{{ range(99999)|map('center', 10**7)|list }}",
        "{% for i in range(99999) %}{{ 'a'|center(10**7) }}{% endfor %}",
        "{% set x %}{% for i in range(99999) %}" + "x" * 99999 + "{% endfor %}{% endset %}",
        "{% macro f() %}" + "x" * 99999 + "{% endmacro %}{% for i in range(99999) %}{{ f() }}{% endfor %}",
        "{% set ns = namespace(a='') %}{% for i in range(99999) %}{% set ns.a = [ns.a, 'x' * 10**6] %}"
        "{% set ns.a = ns.a[0] %}{% endfor %}",
    ],
)  # fmt: skip
def test_what_a_template_makes_in_all_is_limited(source: str) -> None:
    with pytest.raises(RecordError, match="does not fit the template: it would make more than 256"):
        Template(source, of_model=True).render({})


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
        "{% for i in [1] recursive %}{% if loop.depth < 9 %}{{ loop(range(99999)) }}{% endif %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for i in range(99999) %}{{ range(9999)|list|sort|length }}{% endfor %}",
        "{{ ([[0] * 10] * 9999)|sum(start=[])|length }}",
    ],
)  # fmt: skip
def test_a_template_that_goes_on_and_on_ends(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MOST_SECONDS", 0.1)
    with pytest.raises(RecordError, match="does not fit the template: it takes more than"):
        Template(source, of_model=True).render({})


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ 10 ** (10 ** 10) }}", "an integer would have more than"),
        ("{% set ns = namespace(a=3) %}{% for i in range(99) %}{% set ns.a = ns.a * ns.a %}{% endfor %}", "an integer"),
        ("{{ 5|round(-10**9) }}", "round knows 300 digits"),
        ("{{ ('<!---->' * 10**5)|striptags }}", "striptags takes 64 KiB"),
        ("{{ ('x' * 10**5)|wordwrap(1) }}", "wordwrap takes 64 KiB"),
        ("{{ [1]|sort(attribute='a.' * 10**6) }}", "the name of an attribute"),
    ],
)  # fmt: skip
def test_operations_that_take_long_at_once_are_refused(source: str, words: str) -> None:
    with pytest.raises(RecordError, match=f"does not fit the template: {words}"):
        Template(source, of_model=True).render({})


def test_a_list_may_hold_what_is_missing_if_it_is_not_written() -> None:
    source = (
        "{% set o = {'a': a, 'b': [b]} %}{{ 'b' if o.a is defined else 'none' }}{{ (b, 1)|length }}"
    )
    assert Template(source).render({"c": 1}) == "none2"


def test_every_rendering_has_the_whole_allowance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MOST_IN_ALL", 1 << 16)
    template = Template("{{ cause * 9999 }}", of_model=True)
    for _ in range(50):
        assert len(template.render({"cause": "x"})) == 9999


def test_loops_and_filters_write_as_jinja_writes() -> None:
    source = (
        "{% for a in [3, 1, 2]|sort if a > 1 %}{{ loop.index }}/{{ loop.length }}:{{ a }}{{ ',' if not loop.last }}"
        "{% endfor %}{% for k, v in {'a': 1, 'b': [2]}|items %} {{ k ~ v }}{% endfor %}"
        "{% for n in [[1, [2, 3]]] recursive %}({% if n is iterable %}{{ loop(n) }}{% else %}{{ n }}{% endif %})"
        "{% endfor %} {{ [1, 2, 3, 4, 5]|batch(2, 0)|list }} {{ [1, 2, 3]|slice(2)|list }} {{ [1, 2]|sum }} "
        "{{ [{'n': 2}, {'n': 5}]|sum('n') }} {{ 2.567|round(1) }} {{ 'a bc d'|wordwrap(4, wrapstring='/') }} "
        "{{ ['a', 'b']|map('upper')|join('+') }} {{ (1, 2)[::-1] }} {{ {'a': [1]}|tojson(indent=1) }} "
        "{{ [{'n': 2}, {'n': 1}]|sort(attribute='n')|map(attribute='n')|list }} {{ 'abc'[1:] + 'x' ~ 1 }}"
    )
    plain = jinja2.Environment()
    plain.filters["tojson"] = json.dumps
    assert Template(source, of_model=True).render({}) == plain.from_string(source).render()


def test_ordinary_widths_and_numbers_are_written() -> None:
    source = (
        '{{ "-" * 3 }}{{ 7 % 4 }}{{ 2 ** 3 }}{{ "%5.1f" % 2.25 }}{{ "* %d"|format(1700000000) }}{{ "a"|center(3) }}'
        '{{ "{:>3}".format(1) }}{{ "a\nb"|indent(2) }}{{ [1, 2]|join(", ") }}{{ [{"n": 1}, {"n": 2}]|join("+", "n") }}'
    )
    big = (
        '{{ "{:>{}}".format(1700000000, 12) }}{{ "%*d" % (3, 20000000) }}{{ "5%% 20000000 of %s" % 1 }}'
        '{{ "a,b".split(",", 99999999)|length }}{{ "ab".replace("b", "c", 99999999) }}{{ "{{:>99999999}}".format() }}'
        '{{ "-".join(["a", "b"]) }}'
    )
    assert Template(big).render({}) == "  1700000000200000005% 20000000 of 12ac{:>99999999}a-b"
    assert Template(source).render({}) == "---38  2.2* 1700000000 a   1a\n  b1, 21+2"


def test_a_format_with_too_few_values_is_refused() -> None:
    with pytest.raises(RecordError, match=r"does not fit the template: .*index out of range"):
        Template('{{ "{} {}".format(1) }}').render({})


def test_a_template_without_end_and_one_without_bottom_are_one_line(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text(json.dumps(RECORD) + "\n")
    endless = "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}{{ cause }}"
    with pytest.raises(PlanError, match="line 1 does not fit the template: it calls itself"):
        check(plan(path, template=endless))
    deep = "{{ " + "(" * 5000 + "cause" + ")" * 5000 + " }}"
    with pytest.raises(PlanError, match="not a template: it is nested too deeply"):
        check(plan(path, template=deep))


def plan(path: Path, **settings: Any) -> Plan:
    return replace(
        Plan(), {"data.source": str(path), **{f"data.{k}": v for k, v in settings.items()}}
    )


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"template": "chatlm"}, 'did you mean "chatml"'),
        ({"template": "{% for %}"}, "not a template: "),
        ({"template": "model"}, "has no template of its own"),
        ({"template": "none.jinja"}, "No such file"),
        ({"template": "chatml"}, "line 1 is no chat"),
        ({"template": "{{ question }}"}, 'line 1 has no field "question"'),
        ({"loss_on": "answers"}, "needs data.template"),
        ({"template": "{{ cause }}", "loss_on": "answers"}, "the template marks no answer"),
        ({"template": "equipment", "stride": 64}, "records are packed whole"),
        ({"template": "equipment", "code_field": "code"}, "the template has equipment, symptom"),
        ({"code_field": "codes"}, "needs data.template"),
        ({}, 'no column "text"; set data.text_column to one of: equipment'),
        ({}, "or data.template to equipment, or a text with {{ fields }}"),
    ],
)
def test_plan_refuses_what_train_would_refuse(
    settings: dict[str, Any], words: str, tmp_path: Path
) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text(json.dumps(RECORD) + "\n")
    with pytest.raises(PlanError) as error:
        check(plan(path, **settings))
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_plan_tells_what_chats_need_and_texts_have_no_records(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps(CHAT) + "\n")
    with pytest.raises(PlanError, match=r"it holds chats .*: set data\.template, .* chatml"):
        check(plan(path))
    check(plan(path, template="chatml", loss_on="answers"))
    (tmp_path / "a.txt").write_text("words")
    with pytest.raises(PlanError, match="holds no records"):
        check(plan(tmp_path / "a.txt", template="chatml"))


@pytest.mark.parametrize("value", [5, ["a"], {"a": 1}, True])
def test_plan_refuses_a_text_that_is_none(value: object, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": value}) + "\n")
    with pytest.raises(PlanError, match=r'a\.jsonl: line 1: field "text" holds .*, expected text'):
        check(plan(path))
    path.write_text('{"text": null}\n{"text": "words"}\n')
    check(plan(path))


def test_plan_refuses_a_file_whose_beginning_tells_that_no_run_can_read_it(tmp_path: Path) -> None:
    def refused(name: str, content: bytes, **settings: Any) -> str:
        (tmp_path / name).write_bytes(content)
        try:
            check(plan(tmp_path / name, **settings))
        except PlanError as error:
            return f"{error.key}: {error}"
        return ""

    assert refused("a.txt", b"a\0b").endswith("a.txt: holds binary data, not text")
    assert refused("a.txt", b"a b") == ""
    found = refused("t.csv", b"title,body\nx,y\n")
    assert (
        'no column "text"; set data.text_column to one of: title, body; or data.template' in found
    )
    assert "one of: title, body" in refused("t.tsv", "\ufefftitle\tbody\nx\ty\n".encode())
    for content in (b'"text",n\nx,1\n', b'"a\nb",text\n1,x\n', b",n\n1,x\n", b"\nn,text\n1,x\n"):
        assert refused("t.csv", content) == ""
    assert refused("t.csv", b"a,b\n1,2\n", text_column="b") == ""
    assert refused("t.csv", b"a,b\n1,2\n", template="{{ a }}") == ""
    assert (
        refused("t.csv", b"a,b\n1,2\n", template="{{ a }}{% if c is defined %}{{ c }}{% endif %}")
        == ""
    )
    found = refused("t.csv", b"a,b\n1,2\n", template="{{ a }} {{ c }}")
    assert found.startswith("data.template: ")
    assert found.endswith('t.csv: line 1 has no column "c": it has a, b')
    found = refused("t.csv", b"question,answer\n1,2\n", template="chatml")
    assert "line 1 is no header of chats: it has question, answer, expected messages" in found
    assert refused("t.csv", b"prompt,completion\n1,2\n", template="chatml") == ""


def test_a_table_of_preferences_has_both_answers(tmp_path: Path) -> None:
    path = tmp_path / "pairs.csv"
    dpo = {"train.objective": "dpo", "model.weights": "random"}
    path.write_text("prompt,chosen,rejected\na,b,c\n")
    check(replace(plan(path, template="chatml"), dpo))
    path.write_text("prompt,chosen\na,b\n")
    with pytest.raises(PlanError, match='line 1 has no column "rejected": it has prompt, chosen'):
        check(replace(plan(path, template="chatml"), dpo))


def test_the_template_of_a_model_is_read_from_its_directory(tmp_path: Path) -> None:
    architecture = {
        "model_type": "gpt2",
        "vocab_size": 300,
        "n_embd": 32,
        "n_layer": 1,
        "n_head": 2,
    }
    (tmp_path / "config.json").write_text(json.dumps({**architecture, "n_positions": 64}))
    own = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    settings = {"model.name": str(tmp_path), "data.template": "model"}
    with pytest.raises(PlanError, match="holds no chat template"):
        template_of(replace(Plan(), settings))
    written = {"chat_template": own, "bos_token": {"content": "<s>"}, "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(written))
    found = template_of(replace(Plan(), settings))
    assert found is not None
    assert found.render({"prompt": "Hi", "completion": "Yo"}) == "<s>user: Hi\nassistant: Yo\n"
    (tmp_path / "chats.jsonl").write_text(json.dumps(CHAT) + "\n")
    chats = {
        "model.name": str(tmp_path),
        "data.source": str(tmp_path / "chats.jsonl"),
        "data.sequence_length": 64,
    }
    with pytest.raises(PlanError, match=r"set data\.template, for example to model"):
        check(replace(Plan(), chats))
