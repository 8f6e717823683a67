"""What it costs to hold answers to a form: compiling it, and the mask of each token.

    python -m bench.constraint [--vocabulary 150000] [--answers 40]

Answers are drawn at random from what the masks admit, over a vocabulary of made-up words, and every answer is checked to have the
form. A mask is computed while the device runs the forward of the token before it, and costs nothing while it is shorter than that.
Times are the thread's own, so that other load on the machine does not count.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from bench.stats import summarize
from ds4batch.chat.tracker import Tracker
from ds4batch.engine.constraint import Constraints
from ds4batch.engine.sampler import Draw
from ds4batch.messages import Constraint, Sampling
from ds4batch.server.apis.forcing import constraint
from ds4batch.server.apis.tools import ToolChoice, read_tools
from ds4batch.tokenizer import ModelTokenizer

FREE = 60  # tokens after which an answer is steered to its end
LETTERS = "etaoinshrdlucmfwypvbgkjqxz"
PUNCTUATION = '{}[]",:;()<>/=_-.\n 0123456789'
RANGES = ((0x4E00, 0x9FFF), (0xAC00, 0xD7A3), (0x400, 0x4FF))
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"type": "string"}},
        "kind": {"enum": ["user", "admin", "guest"]},
        "seen": {"type": "object", "properties": {"at": {"type": "string", "format": "date-time"}}, "required": ["at"]},
    },
    "required": ["name", "age", "tags", "kind", "seen"],
    "additionalProperties": False,
}


class Form(NamedTuple):
    """What answers are held to, and how one is checked."""

    name: str
    constraint: Constraint
    body_end: bytes  # of an argument that is plain text, b"" where there is none
    check: Callable[[str], bool]


def words(size: int) -> ModelTokenizer:
    """A vocabulary of all bytes and made-up words, with shares of letters, punctuation and other scripts as real ones have them."""
    rng = random.Random(1)
    found = {bytes([byte]) for byte in range(256)}
    while len(found) < size - 2:
        kind = rng.random()
        if kind < 0.78:
            letters = "".join(rng.choice(LETTERS[: rng.randint(3, 26)]) for _ in range(min(12, 1 + int(rng.expovariate(0.25)))))
            word = " " + letters if kind < 0.5 else letters.capitalize() if kind < 0.6 else letters
        elif kind < 0.84:
            word = "".join(rng.choice(PUNCTUATION) for _ in range(rng.randint(1, 5)))
        else:
            word = "".join(chr(rng.randint(*rng.choice(RANGES))) for _ in range(rng.randint(1, 3)))
        found.add(word.encode())
    table = [*sorted(found), b"<end>", b"<turn>"]
    ids = {data: i for i, data in enumerate(table)}

    def encode(texts: list[str], add_special_tokens: bool) -> list[Any]:
        return [SimpleNamespace(ids=_longest_first(text.encode(), ids)) for text in texts]

    ends = frozenset({size - 2, size - 1})
    return ModelTokenizer(
        tokenizer=SimpleNamespace(encode_batch_fast=encode),
        bytes_by_id=table,
        bos_id=None,
        eos_id=size - 2,
        add_bos=False,
        stop_ids=ends,
        special_ids=ends,
        chat_template=None,
        model_name="words",
        context=1 << 20,
    )


def forms() -> list[Form]:
    """A schema, any object, and calls of one of twelve tools as two families write them."""
    tools = read_tools([{"name": f"tool_{i}", "parameters": PERSON} for i in range(12)], "tools")

    def called(grammar: str) -> Callable[[str], bool]:
        def check(text: str) -> bool:
            tracker = Tracker(grammar, thinking=False, tools={tool.name: tool.strings for tool in tools}, new_id=lambda: "call")
            tracker.push(text)
            return tracker.finish("stop").reason == "tool_calls"

        return check

    def made(choice: ToolChoice, form: dict[str, Any] | None, grammar: str) -> Constraint:
        found = constraint(choice, form, "format", tools if form is None else (), grammar)
        assert found is not None
        return found

    auto, required = ToolChoice(), ToolChoice("required")
    return [
        Form("json_schema", made(auto, {"type": "json_schema", "schema": PERSON}, ""), b"", _is_object),
        Form("json_object", made(auto, {"type": "json_object"}, ""), b"", _is_object),
        Form("12 tools, hermes", made(required, None, "hermes"), b"", called("hermes")),
        Form("12 tools, qwen", made(required, None, "qwen"), b"</parameter>", called("qwen")),
    ]


class Costs(NamedTuple):
    """Of one form."""

    compile_ms: list[float]
    mask_us: list[float]  # a token: taking it, and the mask of the next
    ended: int  # answers that came to their end, all of them checked


def measure(form: Form, constraints: Constraints, tokenizer: ModelTokenizer, answers: int) -> Costs:
    """Draw answers and time every step. Raises AssertionError for one that does not have its form."""
    compile_ms: list[float] = []
    mask_us: list[float] = []
    ended = 0
    for seed in range(answers):
        rng = np.random.default_rng(seed)
        started = time.thread_time()
        matching = constraints.matching(form.constraint, thinking=False)
        compile_ms.append(1e3 * (time.thread_time() - started))
        started, said = time.thread_time(), b""
        for step in range(6 * FREE):
            mask = matching.mask()
            mask_us.append(1e6 * (time.thread_time() - started))
            assert mask is not None
            admitted = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            token = int(rng.choice(admitted)) if step < FREE else _closing(set(admitted.tolist()), said, form.body_end, tokenizer)
            if token in tokenizer.stop_ids:
                ended += 1
                assert form.check(said.decode()), said
                break
            said += tokenizer.token_bytes(token)
            started = time.thread_time()
            matching.take(token, reasoned=True)
    return Costs(compile_ms, mask_us, ended)


def _closing(admitted: set[int], said: bytes, body_end: bytes, tokenizer: ModelTokenizer) -> int:
    """An admitted token that leads to the end of the answer."""
    table = tokenizer.bytes_by_id
    for end in tokenizer.stop_ids & admitted:
        return end
    if body_end and table.index(b"\x01") in admitted:  # which no text in JSON may hold
        done = next(n for n in range(len(body_end) - 1, -1, -1) if said.endswith(body_end[:n]))
        return table.index(body_end[done : done + 1])
    for closer in (b'"', b"}", b"]", b":", b",", b"/"):
        if (token := table.index(closer)) in admitted:
            return token
    return min(admitted, key=lambda token: (len(table[token]), token))


def _is_object(text: str) -> bool:
    return isinstance(json.loads(text), dict)


def _longest_first(text: bytes, ids: dict[bytes, int]) -> list[int]:
    found, at = [], 0
    while at < len(text):
        end = next(end for end in range(min(len(text), at + 40), at, -1) if text[at:end] in ids)
        found.append(ids[text[at:end]])
        at = end
    return found


def host_draw_us(size: int) -> float | None:
    """The median microseconds by which a mask makes a draw on the host longer."""
    state, logits = Draw(Sampling(), [0], ()), np.zeros(size, np.float32)
    state.mask = np.full(-(-size // 32), 0x5555_5555, np.int32)
    taken = []
    for _ in range(200):
        started = time.thread_time()
        state.adjust(logits)
        taken.append(1e6 * (time.thread_time() - started))
    return summarize(taken).p50


def main() -> None:
    """Print a line for the vocabulary and one for each form."""
    parser = argparse.ArgumentParser(prog="constraint", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--vocabulary", type=int, default=150_000, help="tokens")
    parser.add_argument("--answers", type=int, default=12, help="of each form")
    options = parser.parse_args()
    tokenizer = words(options.vocabulary)
    started = time.thread_time()
    constraints = Constraints(tokenizer)
    built = 1e3 * (time.thread_time() - started)
    print(
        f"{options.vocabulary} tokens: {built:.0f} ms once; a masked draw on the host: {host_draw_us(options.vocabulary):.0f} us more"
    )
    for form in forms():
        costs = measure(form, constraints, tokenizer, options.answers)
        masks, compiled = summarize(costs.mask_us), summarize(costs.compile_ms)
        print(
            f"{form.name}: compiled in {compiled.p50:.1f} ms; a mask {masks.mean:.0f} us on average, p50 {masks.p50:.0f}, "
            f"p99 {masks.p99:.0f}, longest {max(costs.mask_us):.0f}; {len(costs.mask_us)} masks, {costs.ended} of "
            f"{options.answers} answers ended, all of them in form"
        )


if __name__ == "__main__":
    main()
