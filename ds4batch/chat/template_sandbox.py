"""The Jinja environment that chat templates run in: the helpers they expect, and a budget.

A template is part of a downloaded file and works on what clients send. Jinja's immutable sandbox keeps it away from the
process; the budget keeps it from running or growing without end: each loop turn and macro call, each character
written, and each string, list or number that an operator, method or filter would blow up is checked. Knows no
messages and no tokens.

Reference for the helpers: transformers' chat_template_utils.
"""

from __future__ import annotations

import functools
import json
import re
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import datetime
from typing import Any

from jinja2 import nodes, pass_context
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_TURNS = 400_000  # loop turns and macro calls in one rendering: about a second
MAX_LENGTH = 64 << 20  # characters written in one rendering, and of one string; items of one list
MAX_WIDTH = 1_000_000  # columns that a method or filter may pad or indent to
MAX_BITS = 4096  # size of a computed whole number

# Filters and methods whose whole-number arguments are widths.
_WIDTH_FILTERS = frozenset({"batch", "center", "indent", "slice", "tojson", "wordwrap"})
_WIDTH_METHODS = frozenset({"center", "expandtabs", "ljust", "rjust", "zfill"})
_TURN = " turn"  # no template can write a filter's name with a space
_WIDE_FORMAT = re.compile(r"\d{7}")


class TemplateError(ValueError):
    """A conversation that a template cannot render; the message says why, in the template's words where it has some."""


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox. One rendering a thread at a time, inside `budget()`."""

    intercepted_binops = frozenset(["*", "+", "**", "%"])

    def __init__(self, clock: Callable[[], datetime]) -> None:
        """`clock` is what strftime_now reads."""
        super().__init__(trim_blocks=True, lstrip_blocks=True, finalize=_finalize, extensions=[_Generation, loopcontrols])
        self._left = threading.local()
        self.globals.pop("lipsum", None)
        self.globals.update(raise_exception=_raise, strftime_now=lambda form: clock().strftime(form))
        self.filters[_TURN] = _spend_turn
        self.filters["tojson"] = _tojson
        self.filters.update({name: _bounded_widths(self.filters[name]) for name in _WIDTH_FILTERS})
        self.filters.update(
            replace=_bounded_replace(self.filters["replace"]),
            join=_bounded_join(self.filters["join"]),
            format=_bounded_format(self.filters["format"]),
        )

    def budget(self) -> AbstractContextManager[None]:
        """A full budget for this thread, for the time of one rendering."""
        return _filled(self._left)

    def spend_turn(self) -> None:
        """Count one loop turn or macro call."""
        self._left.turns -= 1
        if self._left.turns < 0:
            raise TemplateError(f"the chat template takes more than {MAX_TURNS} loop turns")

    def spend_characters(self, count: int) -> None:
        """Count characters that an expression writes."""
        self._left.characters -= count
        if self._left.characters < 0:
            raise TemplateError(f"the chat template writes more than {MAX_LENGTH} characters")

    def join_texts(self, *parts: Any) -> str:
        """The `~` operator."""
        texts = [str(part) for part in parts]
        _check_length(sum(map(len, texts)))
        return "".join(texts)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        blocks: list[Any] = list(tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock)))
        for block in blocks:
            # As a filter, because Jinja compiles a method to a slow call through the sandbox's checks.
            turn = nodes.Filter(nodes.Const(None), _TURN, [], [], None, None)
            block.body.insert(0, nodes.ExprStmt(turn, lineno=block.lineno))
        _replace_concatenation(tree)
        tree.set_environment(self)
        return tree

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        _check_method(__obj, args)
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        return None if wrapped is None else functools.partial(_formatted, wrapped, value.__self__)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+" and _sized(left) and _sized(right):
            _check_length(len(left) + len(right))
        elif operator == "*":
            for many, count in ((left, right), (right, left)):
                if _sized(many) and isinstance(count, int):
                    _check_length(len(many) * count)
            if isinstance(left, int) and isinstance(right, int):
                _check_bits(left.bit_length() + right.bit_length())
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() * abs(right))
        elif operator == "%" and isinstance(left, str):
            _check_format(left, right if isinstance(right, tuple) else (right,))
        return super().call_binop(context, operator, left, right)


class _Generation(Extension):
    """`{% generation %}` marks the assistant's words for training; a server writes what is inside."""

    tags = {"generation"}  # noqa: RUF012  (the shape Jinja asks for)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@contextmanager
def _filled(left: threading.local) -> Any:
    left.turns, left.characters = MAX_TURNS, MAX_LENGTH
    try:
        yield
    finally:
        left.turns = left.characters = 0


@pass_context  # keeps Jinja from calling it while it compiles, when there is no budget
def _finalize(context: Context, value: Any) -> str:
    text = str(value)
    environment = context.environment
    assert isinstance(environment, TemplateEnvironment)
    environment.spend_characters(len(text))
    return text


@pass_context  # likewise
def _spend_turn(context: Context, _: Any) -> None:
    environment = context.environment
    assert isinstance(environment, TemplateEnvironment)
    environment.spend_turn()


def _formatted(wrapped: Callable[..., str], form: str, *args: Any, **kwargs: Any) -> str:
    mapped = [value for table in args if isinstance(table, dict) for value in table.values()]  # of format_map
    _check_format(form, (*args, *mapped, *kwargs.values()))
    return wrapped(*args, **kwargs)


def _own_method(name: str, args: list[nodes.Expr]) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(name), args, [], None, None)


def _replace_concatenation(node: nodes.Node) -> None:
    """Turn every `a ~ b` below `node` into a call of join_texts: Jinja compiles the operator to a plain join."""
    for name, value in list(node.iter_fields()):
        for i, child in enumerate(value if isinstance(value, list) else [value]):
            if not isinstance(child, nodes.Node):
                continue
            _replace_concatenation(child)
            if isinstance(child, nodes.Concat):
                call = _own_method("join_texts", child.nodes).set_lineno(child.lineno)
                if isinstance(value, list):
                    value[i] = call
                else:
                    setattr(node, name, call)


def _sized(value: Any) -> bool:
    return isinstance(value, (str, list, tuple))


def _check_length(length: int) -> None:
    if length > MAX_LENGTH:
        raise TemplateError(f"the chat template builds more than {MAX_LENGTH} characters or items at once")


def _check_bits(bits: int) -> None:
    if bits > MAX_BITS:
        raise TemplateError(f"the chat template computes a number of more than {MAX_BITS} bits")


def _check_widths(values: Sequence[Any]) -> None:
    if any(isinstance(value, int) and value > MAX_WIDTH for value in values):
        raise TemplateError(f"the chat template pads to more than {MAX_WIDTH} columns")


def _check_format(form: str, values: Sequence[Any]) -> None:
    if _WIDE_FORMAT.search(form):
        raise TemplateError(f"the chat template pads to more than {MAX_WIDTH} columns")
    if "*" in form or "{" in form:  # widths may be among the values
        _check_widths(values)
    _check_length(len(form) + sum(len(value) for value in values if isinstance(value, str)) * max(1, form.count("{")))


def _check_replace(text: str, old: Any, new: Any) -> None:
    if isinstance(old, str) and isinstance(new, str):
        _check_length(len(text) + text.count(old) * max(0, len(new) - len(old)))


def _check_join(separator: str, items: Sequence[Any]) -> None:
    _check_length(len(separator) * len(items) + sum(len(item) for item in items if isinstance(item, str)))


def _check_method(method: Any, args: Sequence[Any]) -> None:
    text, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
    if not isinstance(text, str):
        return
    if name in _WIDTH_METHODS:
        _check_widths(args)
    elif name == "replace" and len(args) >= 2:
        _check_replace(text, args[0], args[1])
    elif name == "join" and args and isinstance(args[0], (list, tuple)):
        _check_join(text, args[0])


def _bounded_widths(filter_: Any) -> Any:
    @functools.wraps(filter_)  # keeps the marks that say what Jinja passes first
    def checked(*args: Any, **kwargs: Any) -> Any:
        _check_widths((*args[1:], *kwargs.values()))
        return filter_(*args, **kwargs)

    return checked


def _bounded_replace(filter_: Any) -> Any:
    @functools.wraps(filter_)
    def checked(context: Any, text: Any, old: Any, new: Any, *rest: Any, **kwargs: Any) -> Any:
        _check_replace(str(text), old, new)
        return filter_(context, text, old, new, *rest, **kwargs)

    return checked


def _bounded_join(filter_: Any) -> Any:
    @functools.wraps(filter_)
    def checked(context: Any, items: Any, d: Any = "", *rest: Any, **kwargs: Any) -> Any:
        items = list(items)
        _check_join(str(d), items)
        return filter_(context, items, d, *rest, **kwargs)

    return checked


def _bounded_format(filter_: Any) -> Any:
    @functools.wraps(filter_)
    def checked(form: Any, *args: Any, **kwargs: Any) -> Any:
        _check_format(str(form), (*args, *kwargs.values()))
        return filter_(form, *args, **kwargs)

    return checked


def _raise(message: Any) -> None:
    raise TemplateError(str(message))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML; models were trained on plain JSON.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
