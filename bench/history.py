"""What a long history costs before its request can be queued: seconds for thousands of tool calls with their results.

    python -m bench.history [--pairs 4096] [--repeats 5]

A line is one API in one dialect. The body is parsed, read, given the sampled text of its calls from the tool memory, and rendered,
as the server does before it tokenises; every eighth answer makes two calls. The history comes about as in the server: sampled text is
tracked, written in the API's form and kept by a client. Every rendering is checked: all calls were replayed as they were sampled, and
the last result is in the prompt. The exit status is 1 when a history takes GOAL_SECONDS or longer, or when it takes MOST_GROWTH times
as long as half of it, or longer.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from bench.answers import APIS, Api
from bench.replay import DIALECTS, spelled
from bench.replay_clients import sse_events
from bench.replay_growth import READERS
from bench.replay_transcript import TOOLS, Call, Turn
from ds4batch.chat.dialects.base import Dialect
from ds4batch.chat.events import Turn as SampledTurn
from ds4batch.chat.tracker import Tracker
from ds4batch.messages import Finished
from ds4batch.server.apis.served import Served
from ds4batch.server.jsonbody import parse_object
from ds4batch.server.run import load_text_model
from ds4batch.server.tool_memory import ToolMemory
from ds4batch.settings import Settings

GOAL_SECONDS = 2.0
MOST_GROWTH = 2.6
_SERVED = Served("any", 1000, 1 << 20, 300, False)
_STRINGS = {
    name: frozenset(key for key, form in properties.items() if form["type"] == "string") for name, properties in TOOLS.items()
}
_FINISHED = Finished(
    id=0, reason="tool_calls", prompt_tokens=1, cached_tokens=0, completion_tokens=1, queue_seconds=0.0, prefill_seconds=0.0,
    decode_seconds=0.0,
)  # fmt: skip


class History(NamedTuple):
    """A request that brings the result of its last call."""

    body: bytes
    memory: ToolMemory  # knows all calls
    answers: int  # that made them
    last: str  # result


def history(api: Api, dialect: Dialect, pairs: int) -> History:
    """A conversation of `pairs` calls with their results."""
    client, memory, ids = api.client("You are an agent."), ToolMemory(2 * pairs), itertools.count()
    client.ask("Go through all files.")
    made = answers = 0
    while made < pairs:
        calls = tuple(_call(made + i) for i in range(min(2 if answers % 8 == 7 else 1, pairs - made)))
        results = tuple(f'{{"ok": true, "n": {made + i}}} <é>' for i in range(len(calls)))
        sampled = spelled(dialect.name, Turn("", "", f"Now number {made}, größer?", "", calls, results))
        thinking, wire = dialect.name != "jinja", api.wire()
        tracker = Tracker(dialect.grammar, thinking=thinking, tools=_STRINGS, new_id=lambda: f"call_{next(ids)}")
        sent = wire.opening() + wire.events(events := tracker.push(sampled), [])
        end = tracker.finish("stop")
        assert end.raw is not None
        turn = SampledTurn()
        turn.add([*events, *end.events])
        memory.remember(turn.complete_calls, end.raw)
        reply = client.take(sse_events(sent + wire.events(end.events, []) + wire.closing(_FINISHED)))
        client.bring(list(zip(reply.calls, results, strict=True)))
        made, answers = made + len(calls), answers + 1
    return History(json.dumps(client.body()).encode(), memory, answers, results[-1])


def _call(number: int) -> Call:
    """Arguments that are not in the order of the schema."""
    if number % 2:
        return Call("Grep", {"path": f"/src/größe/{number}", "pattern": r"\w+\"", "globs": ["*.py", "*.é"], "-n": True})
    return Call(
        "Edit", {"new_string": 'a < b && "c"\n' * 4, "old_string": f"line {number}\n\t\\n", "file_path": f"/src/{number}.py"}
    )


def seconds(given: History, api: Api, dialect: Dialect) -> float:
    """From the body to the prompt. Raises AssertionError for a prompt that is not what it should be."""
    gc.collect()  # what is measured pays for its own objects only
    started = time.perf_counter()
    conversation = READERS[api.name](parse_object(given.body), _SERVED).conversation
    messages, replay = given.memory.attach(conversation, dialect.grammar)
    text = dialect.render(replace(conversation, messages=messages)).text
    taken = time.perf_counter() - started
    assert (replay.replayed, replay.rewritten, replay.missing) == (given.answers, 0, 0), f"{api.name}, {dialect.name}: {replay}"
    assert text.count(given.last) == 1, f"{api.name}, {dialect.name}: the last result is not in the prompt"
    return taken


def main() -> None:
    """Print one line an API and dialect."""
    parser = argparse.ArgumentParser(prog="history", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=4096, help="calls with their results")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    bad = False
    print(
        f"{'dialect':<14} {'API':<10} {'MB':>6} {f'{options.pairs // 2} pairs':>12} {f'{options.pairs} pairs':>12} {'growth':>7}"
    )
    for name, api in itertools.product(DIALECTS, APIS):
        dialect = _dialect(name)
        half, whole = history(api, dialect, options.pairs // 2), history(api, dialect, options.pairs)
        short, long = (min(seconds(given, api, dialect) for _ in range(options.repeats)) for given in (half, whole))
        bad = bad or long >= GOAL_SECONDS or long >= MOST_GROWTH * short
        size = len(whole.body) / 1e6
        print(f"{name:<14} {api.name:<10} {size:>6.1f} {short:>10.3f} s {long:>10.3f} s {long / short:>6.2f}x", flush=True)
    sys.exit(bad)


def _dialect(name: str) -> Dialect:
    """A dialect as a scripted model has it."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "script.json"
        script.write_text(json.dumps({"dialect": name, "answers": []}))
        return load_text_model(Settings(script=str(script))).dialect


if __name__ == "__main__":
    main()
