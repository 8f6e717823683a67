"""A model without sense: random logits over a vocabulary of bytes, held to a form. Used by the tests of constraints and of forcing."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ds4batch.chat.events import Turn
from ds4batch.chat.tracker import Tracker
from ds4batch.engine.constraint import Constraints
from ds4batch.engine.output import TextOutput
from ds4batch.engine.sampler import Draw, draw
from ds4batch.messages import Constraint, Sampling
from ds4batch.scripted.vocabulary import scripted_tokenizer
from scheduler.backend import Sampled

WORDS = scripted_tokenizer("words.json")
CONSTRAINTS = Constraints(WORDS)
SPECIAL = {text: i for i in WORDS.special_ids for text in [WORDS.token_bytes(i).decode()]}
MARKED = frozenset(SPECIAL[text] for text in ("<think>", "</think>", "<tool_call>", "</tool_call>", "<|python_tag|>", "｜DSML｜"))
CLOSERS = ('"', "}", "]")
ASCII = [chr(code) for code in range(32, 127)]


class Reader(NamedTuple):
    """How the answer is read."""

    grammar: str
    tools: Mapping[str, frozenset[str]] | None = None
    thinking: bool = False


class Answer(NamedTuple):
    """What came out."""

    text: str
    turn: Turn
    reason: str
    masks: list[bool]  # for each token drawn, the last one too: whether it was masked


class Babbler:
    """Draws an answer. For `free` tokens anything goes that the form admits; then it would like to come to an end."""

    def __init__(
        self,
        constraint: Constraint,
        reader: Reader,
        *,
        seed: int = 0,
        free: int = 40,
        ends: Sequence[str] = (),
        stop: Sequence[str] = (),
        temperature: float = 1.0,
    ) -> None:
        """`ends`: texts that end a body of text."""
        self.position = 0
        self.sampling = Sampling(temperature=temperature, seed=seed, top_p=0.95)
        self.draw = Draw(self.sampling, [0], WORDS.stop_ids)
        ids = itertools.count()
        self.output = TextOutput(
            WORDS.token_bytes,
            WORDS.special_ids - MARKED,
            stop,
            lambda piece: None,
            lambda: Tracker(reader.grammar, thinking=reader.thinking, tools=reader.tools, new_id=lambda: f"call_{next(ids)}"),
            self.draw,
            CONSTRAINTS.matching(constraint, reader.thinking),
        )
        self.raw = b""
        self.masks: list[bool] = []
        self._random = np.random.default_rng(seed)
        self._free = free
        self._ends = [end.encode() for end in ends]
        self._in_body = False

    def logits(self) -> np.ndarray:
        """Of the next token."""
        logits = self._random.normal(0, 3, WORDS.vocab_size + 9).astype(np.float32)  # as many rows as padding gives
        if self.position >= self._free:
            self._note_body()
            for end in self._ends if self._in_body else ():
                done = next(n for n in range(len(end) - 1, -1, -1) if self.raw.endswith(end[:n]))
                logits[WORDS.bytes_by_id.index(end[done : done + 1])] += 90
            for closer in CLOSERS:
                logits[WORDS.encode(closer)[0]] += 60
            logits[WORDS.encode("/")[0]] += 30  # the end of all calls rather than another one
            logits[sorted(WORDS.stop_ids)] += 120
        return logits

    def _note_body(self) -> None:
        """Whether any text may come, other than in JSON, whose texts have no control characters. Inside a character nothing changes."""
        if self.draw.mask is not None:
            admitted = np.unpackbits(self.draw.mask.view(np.uint8), bitorder="little")
            if any(admitted[WORDS.encode(letter)[0]] for letter in ASCII):
                self._in_body = bool(admitted[WORDS.bytes_by_id.index(b"\x01")])

    def push(self, token: int) -> str | None:
        """Take a token; returns how the answer ended, if it did."""
        self.masks.append(self.draw.mask is not None)
        if token in WORDS.stop_ids:
            return "stop"
        self.position += 1
        self.raw += WORDS.token_bytes(token)
        verdict = self.output.push(Sampled(token, None, ()))
        return None if verdict is None else verdict.reason

    def run(self, script: str = "", limit: int = 3000) -> Answer:
        """The whole answer; it begins with `script`, as far as that is admitted."""
        reason: str | None = None
        said = WORDS.encode(script)
        while reason is None:
            if self.position == limit:
                reason = "length"
                break
            logits = self.logits()
            if self.position < len(said):
                logits[said[self.position]] += 1000
            reason = self.push(draw(logits, self.draw, self.position).token)
        reason = self.output.finish(reason)  # type: ignore[arg-type]
        return Answer(self.raw.decode(), self.output.turn, reason, self.masks)


def fits(schema: Any, value: Any, root: Any = None) -> bool:
    """Whether a value is what a JSON schema of the keywords below wants."""
    root = schema if root is None else root
    if isinstance(schema, bool):
        return schema
    if "$ref" in schema:
        target = root
        for step in schema["$ref"].removeprefix("#").split("/")[1:]:
            target = target[step]
        return fits(target, value, root)
    kinds = {
        "string": str, "integer": int, "number": (int, float), "boolean": bool, "null": type(None), "array": list, "object": dict,
    }  # fmt: skip
    if "type" in schema:
        wanted = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
        of = [isinstance(value, kinds[k]) and (k == "boolean" or not isinstance(value, bool)) for k in wanted]
        if not any(of):
            return False
    checks = [value in schema.get("enum", [value]), value == schema.get("const", value)]
    checks += [any(fits(way, value, root) for way in schema["anyOf"])] if "anyOf" in schema else []
    if isinstance(value, int | float) and not isinstance(value, bool):
        checks += [schema.get("minimum", value) <= value <= schema.get("maximum", value)]
    if isinstance(value, str):
        checks += [schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", 10**9)]
        checks += [re.search(schema.get("pattern", ""), value) is not None]
    if isinstance(value, list):
        checks += [schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", 10**9)]
        checks += [fits(schema.get("items", True), item, root) for item in value]
    if isinstance(value, dict):
        declared = schema.get("properties", {})
        checks += [key in value for key in schema.get("required", [])]
        checks += [fits(declared.get(key, schema.get("additionalProperties", True)), item, root) for key, item in value.items()]
    return all(checks)
