"""The environment that templates run in: nothing outside is reached, no huge text is made, and every rendering ends."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.utils import pass_context

from memconsole.plan.templates.filters import LIMITED, limit_format, limit_replaced
from memconsole.plan.templates.limits import ELEMENT, Allowance, check_size, extent, limit_product

_PADDING = frozenset({"center", "ljust", "rjust", "zfill", "to_bytes"})
"""Methods whose first argument is the least length of what they return."""


class _Counted(CodeGenerator):
    """Code that counts each block that it enters, such as the body of a loop, and what operators and literals make."""

    def blockvisit(self, nodes_: Iterable[nodes.Node], frame: Any) -> None:
        block = list(nodes_)
        texts = (child for node in block if isinstance(node, nodes.Output) for child in node.nodes)
        size = sum(len(text.data) for text in texts if isinstance(text, nodes.TemplateData))
        self.writeline(f"environment.allowance.spend({ELEMENT + size})")
        super().blockvisit(block, frame)

    def visit_For(self, node: nodes.For, frame: Any) -> None:  # noqa: N802
        if node.test is not None:
            node.test = nodes.And(_counts(), node.test)
        super().visit_For(node, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Any) -> None:  # noqa: N802
        self.write("environment.joined((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def visit_Getitem(self, node: nodes.Getitem, frame: Any) -> None:  # noqa: N802
        self._counted(
            "count_part", super().visit_Getitem, node, frame, isinstance(node.arg, nodes.Slice)
        )

    def visit_List(self, node: nodes.List, frame: Any) -> None:  # noqa: N802
        self._counted("count_made", super().visit_List, node, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Any) -> None:  # noqa: N802
        self._counted("count_made", super().visit_Dict, node, frame)

    def visit_Tuple(self, node: nodes.Tuple, frame: Any) -> None:  # noqa: N802
        self._counted("count_made", super().visit_Tuple, node, frame, node.ctx == "load")

    def _counted(
        self, by: str, visit: Callable[[Any, Any], None], node: Any, frame: Any, makes: bool = True
    ) -> None:
        """Write what `visit` writes. If it makes a value, the method `by` of the allowance counts it."""
        if makes:
            self.write(f"environment.allowance.{by}(")
        visit(node, frame)
        if makes:
            self.write(")")


class Sandbox(ImmutableSandboxedEnvironment):
    """A sandbox whose renderings keep within the limits of `memconsole.plan.templates.limits`. ``with allowance:``
    encloses each one."""

    intercepted_binops = frozenset({"+", "*", "**", "%", "//"})
    code_generator_class = _Counted

    def __init__(self, finalize: Callable[[Any], Any] | None = None, **options: Any) -> None:
        self.allowance = Allowance()

        @pass_context  # so that no constant is written by the compiler, uncounted
        def written(_: Context, value: Any) -> Any:
            return self.allowance.count_made(value if finalize is None else finalize(value))

        super().__init__(optimized=False, finalize=written, **options)
        self.filters = {
            name: self._counted(filter_) for name, filter_ in {**self.filters, **LIMITED}.items()
        }
        del self.globals["lipsum"]  # random text of any length

    def _counted(self, apply: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(apply)
        def counted(*args: Any, **kwargs: Any) -> Any:
            return self.allowance.count_made(apply(*args, **kwargs))

        return counted

    def counts(self) -> bool:
        """Always true: put into a condition so that each evaluation is counted as a call."""
        return True

    def joined(self, parts: Sequence[Any]) -> Any:
        """What ``~`` makes."""
        check_size(sum(map(extent, parts)))
        return self.allowance.count_made("".join(map(str, parts)))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if isinstance(left, str) and operator == "+":
            return self.allowance.count_made(left + right)
        if isinstance(left, int) and isinstance(right, int):
            if operator != "+":
                limit_product(operator, left, right)
        elif operator == "+":
            check_size(extent(left) + extent(right))
        elif operator == "*":
            for one, times in ((left, right), (right, left)):
                if isinstance(times, int):
                    check_size(extent(one) * times)
        elif operator == "%" and isinstance(left, str):
            limit_format(left, right)
        return self.allowance.count_made(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        method = getattr(__obj, "__wrapped__", __obj)  # the sandbox wraps str.format
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str | bytes | int):
            name = getattr(method, "__name__", "")
            if name == "join" and args:
                args = (list(args[0]),)
            __self._limit_method(owner, name, args, kwargs)
        return __self.allowance.count_made(super().call(__context, __obj, *args, **kwargs))

    def _limit_method(
        self, owner: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        """Raise `SecurityError` if this method of `owner` would make too much."""
        first: Any = next(iter((*args, *kwargs.values())), 0)
        if name in _PADDING and isinstance(first, int):
            check_size(first)
        elif name == "expandtabs" and isinstance(first, int):
            check_size(first * len(owner))
        elif name == "replace" and len(args) > 1:
            limit_replaced(owner, args[0], args[1])
        elif name == "join" and args:
            check_size(sum(len(part) + len(owner) for part in first))
        elif name == "translate" and isinstance(first, Mapping):
            check_size(len(owner) * max(map(extent, first.values()), default=1))
        elif name == "format":
            _Measured(self).vformat(owner, args, kwargs)
        elif name == "format_map":
            _Measured(self).vformat(owner, (), first)


class _Measured(SandboxedFormatter):
    """Formats everything but the fields with a width or a precision, and limits the sum of all."""

    def __init__(self, environment: Sandbox) -> None:
        super().__init__(environment)
        self._size = 0

    def format_field(self, value: Any, format_spec: str) -> str:
        sizes = [int(word) for word in re.findall(r"\d+", format_spec)]
        text = "" if sizes else str(super().format_field(value, format_spec))
        self._size += sum(sizes) + len(text)
        check_size(self._size)
        return text


def _counts() -> nodes.Call:
    """A node that calls `Sandbox.counts`."""
    return nodes.Call(nodes.EnvironmentAttribute("counts"), [], [], None, None)
