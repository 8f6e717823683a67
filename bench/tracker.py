"""What reading the answers costs: microseconds a token a row, and whether that stays the same however long the answer is.

    python -m bench.tracker [--rows 16] [--tokens 4000] [--repeats 5]

Rows take turns token by token, as in a step of the batch. Each line is one kind of text in one grammar, the figures are the best
of the repeats, and the last column compares a token of an answer with one of an answer eight times as long. Every reading is
checked: its text must be what was fed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from ds4batch.chat.events import Turn, TurnEvent
from ds4batch.chat.tracker import THINK_END, Tracker

TIMES = 8  # as long is the answer that shows whether the cost is linear
TOOLS = {"sh": frozenset({"cmd"})}


class Load(NamedTuple):
    """One kind of text: what opens it, its tokens, what closes it, and whether the text of all tokens came out right."""

    name: str
    grammar: str
    thinking: bool
    opening: str
    token: Callable[[int], str]
    closing: str
    right: Callable[[Turn, str], bool]


def _word(number: int) -> str:
    return (" word", " of", " text", ",", "\n", " x<y", " more", ' "q"')[number % 8]


def _json(number: int) -> str:
    return ('"key', f"{number}", '": [', f"{number}, ", "true", "], ", '"s": "a b"', ", ")[number % 8]


def _content(turn: Turn, text: str) -> bool:
    return turn.content == text


def _reasoning(turn: Turn, text: str) -> bool:
    return turn.reasoning == [text]


def _string(turn: Turn, text: str) -> bool:
    return list(_arguments(turn).values()) == [text]


def _members(turn: Turn, text: str) -> bool:
    expected = json.loads(f'{{{text}"": 0}}')
    return _arguments(turn) in ({"n": expected}, expected)


def _arguments(turn: Turn) -> dict[str, Any]:
    arguments: dict[str, Any] = json.loads(turn.complete_calls[0].arguments)
    return arguments


_INVOKE = '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="sh">\n<｜DSML｜parameter name="'
_INVOKED = "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>"
_XML, _XML_END = "<tool_call>sh<arg_key>{}</arg_key><arg_value>", "</arg_value></tool_call>"
_PYTHON, _PYTHON_END = "<tool_call>\n<function=sh>\n<parameter=cmd>\n", "\n</parameter>\n</function>\n</tool_call>"

LOADS = [
    Load("content", "", False, "", _word, "", _content),
    Load("content", "dsml", False, "", _word, "", _content),
    Load("content, held", "dsml", True, THINK_END, _word, "", _content),
    Load("reasoning", "dsml", True, "", _word, THINK_END, _reasoning),
    Load("string", "dsml", False, f'{_INVOKE}cmd" string="true">', _word, _INVOKED, _string),
    Load("JSON", "dsml", False, f'{_INVOKE}n" string="false">{{', _json, f'"": 0}}{_INVOKED}', _members),
    Load("string", "glm", False, _XML.format("cmd"), _word, _XML_END, _string),
    Load("untyped", "glm", False, _XML.format("n"), _word, _XML_END, _string),
    Load("string", "qwen", False, _PYTHON, _word, _PYTHON_END, _string),
    Load("JSON", "hermes", False, '<tool_call>{"name": "sh", "arguments": {', _json, '"": 0}}</tool_call>', _members),
]


def measure(load: Load, rows: int, tokens: int) -> float:
    """Microseconds a token a row. Raises AssertionError where the text does not come out."""
    pieces = [load.opening, *map(load.token, range(tokens - tokens % 8)), load.closing]
    ids = itertools.count()
    readers = [
        Tracker(load.grammar, thinking=load.thinking, tools=TOOLS, new_id=lambda: f"call_{next(ids)}") for _ in range(rows)
    ]
    kept: list[list[TurnEvent]] = []  # of one row: a server passes events on and forgets them
    started = time.perf_counter()
    for piece in pieces:
        for reader in readers:
            events = reader.push(piece)
            _ = reader.greedy, reader.done
        kept.append(events)
    taken = time.perf_counter() - started
    end = readers[-1].finish("stop")
    turn = Turn()
    for events in (*kept, end.events):
        turn.add(events)
    assert load.right(turn, "".join(pieces[1:-1])), f"{load.name} of {load.grammar} came out wrong"
    return 1e6 * taken / (rows * len(pieces))


def main() -> None:
    """Print one line a load."""
    parser = argparse.ArgumentParser(prog="tracker", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    print(f"{'text':<16} {'grammar':<8} {'us/token/row':>12} {f'{TIMES} x as long':>14}")
    for load in LOADS:
        short = min(measure(load, options.rows, options.tokens) for _ in range(options.repeats))
        long = min(measure(load, options.rows, options.tokens * TIMES) for _ in range(max(1, options.repeats // 2)))
        print(f"{load.name:<16} {load.grammar or '-':<8} {short:>12.2f} {long / short:>13.2f}x", flush=True)


if __name__ == "__main__":
    main()
