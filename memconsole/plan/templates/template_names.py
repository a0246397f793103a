"""What the source of a template names: fields of records, tags, and other words."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from jinja2 import Environment, meta, nodes

from memconsole.plan.models.tokenizer_file import TAG
from memconsole.plan.templates.environment import is_answer_block


class TemplateNames(NamedTuple):
    """The names in a template's source."""

    writes_chats: bool
    """Whether it reads `messages`; otherwise it reads records by the names of their fields."""
    fields: tuple[str, ...]
    """The fields of a record, in the order of the template; empty if it writes chats."""
    answer_fields: tuple[str, ...]
    """Those of `fields` that are within `{% generation %}`."""
    has_answer_blocks: bool
    """Whether it has `{% generation %}`."""
    mentioned: frozenset[str]
    """Variables, attributes and literal texts: if a field of a chat is not among them, the template does not ask for it."""
    tags: tuple[str, ...]
    """Words like `<cause>` that it writes."""


def template_names(environment: Environment, source: str, known: Collection[str]) -> TemplateNames:
    """The names in `source`. `known` are variables that are no fields of records. Raises `TemplateSyntaxError`."""
    tree = environment.parse(source)
    variables = meta.find_undeclared_variables(tree) - {*known}
    in_order = [
        node.name
        for node in tree.find_all(nodes.Name)
        if node.ctx == "load" and node.name in variables
    ]
    writes_chats = "messages" in variables
    fields = () if writes_chats else tuple(dict.fromkeys(in_order))
    answer_blocks = [block for block in tree.find_all(nodes.CallBlock) if is_answer_block(block)]
    answered = {node.name for block in answer_blocks for node in block.find_all(nodes.Name)}
    attributes = {node.attr for node in tree.find_all(nodes.Getattr)}
    constants = [n.value for n in tree.find_all(nodes.Const) if isinstance(n.value, str)]
    texts = [*(node.data for node in tree.find_all(nodes.TemplateData)), *constants]
    return TemplateNames(
        writes_chats=writes_chats,
        fields=fields,
        answer_fields=tuple(name for name in fields if name in answered),
        has_answer_blocks=bool(answer_blocks),
        mentioned=frozenset({*variables, *attributes, *constants}),
        tags=tuple(dict.fromkeys(tag for text in texts for tag in TAG.findall(text))),
    )
