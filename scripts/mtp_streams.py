"""What the model answers, many prompts at a time through the engine, kept as one flat array.

Owns the loop over the engine, where answers are cut, and the file they may be kept in. Draws on the device are chained: a step is
launched before the tokens of the last one are known, so the host's work a step is a few microseconds a session.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ds4batch.engine.engine import Engine
from ds4batch.engine.sampler import Draw
from ds4batch.messages import Sampling
from scheduler.backend import CHAINED, Pick, Work
from scripts.mtp_prompts import KINDS, Prompt

REPEATED = 64
"""An answer ends when so many of its tokens in a row repeat those before."""

LONGEST_PERIOD = 96
LOOKED_AFTER = 16  # tokens between two looks for repetition
IN_LOOP = 32  # repeated tokens behind which a token counts as part of a loop

Tokens = npt.NDArray[np.int32]


class Limits(NamedTuple):
    """Where answers end."""

    new: int  # tokens of one
    rows: int  # of a forward
    deadline: float  # time.monotonic(); what is unfinished then is kept as it is
    tokens: int  # of all answers together


@dataclass(slots=True)
class Stream:
    """One prompt and its answer."""

    prompt: list[int]
    kind: str
    held: bool
    draw: Draw
    tokens: list[int] = field(default_factory=list)
    slot: int = -1
    done: bool = False

    @property
    def greedy(self) -> bool:
        return self.draw.temperature == 0.0


def streams_of(prompts: Iterable[Prompt], encode: Callable[[Sequence[Prompt]], list[list[int]]], sampled: float, longest: int,
               seed: int, block: int = 1024) -> Iterator[Stream]:  # fmt: skip
    """Streams that have not begun, tokenised as they are asked for. Prompts of more than `longest` tokens are left out.

    A share of `sampled` draws at temperatures 0.7 to 1.0, but for those that are held out: all of these are greedy.
    """
    chance = np.random.default_rng(seed)
    greedy = Draw(Sampling(temperature=0.0), (), ())
    waiting = list(prompts)
    for at in range(0, len(waiting), block):
        part = waiting[at : at + block]
        for prompt, ids in zip(part, encode(part), strict=True):
            if len(ids) > longest:
                continue
            warm = Sampling(temperature=float(chance.uniform(0.7, 1.0)), seed=int(chance.integers(2**62)))
            draw = Draw(warm, (), ()) if not prompt.held and chance.random() < sampled else greedy
            yield Stream(ids, prompt.kind, prompt.held, draw)


def generate(
    engine: Engine, streams: Iterator[Stream], stops: frozenset[int], limits: Limits, say: Callable[[str], None]
) -> list[Stream]:
    """Answer streams until they or the time are used up; those that have a token, in the order in which they began."""
    chained = engine.can_chain(0, Draw(Sampling(temperature=0.0), (), ()))
    free = list(range(len(engine.sessions)))[::-1]
    begun: list[Stream] = []
    known = shown = 0
    start = said = time.monotonic()

    def begin(room: int) -> list[Stream]:
        """As many new streams as there are slots and rows for."""
        fresh: list[Stream] = []
        while free and room >= longest:
            stream = next(streams, None)
            if stream is None:
                break
            stream.slot = free.pop()
            room -= len(stream.prompt)
            fresh.append(stream)
        begun.extend(fresh)
        return fresh

    def work_of(running: Sequence[Stream], fresh: Sequence[Stream]) -> list[Work]:
        work = [Work(s.slot, CHAINED if chained else s.tokens[-1:], True) for s in running]
        return work + [Work(s.slot, s.prompt, True) for s in fresh]

    longest = min(limits.rows - len(engine.sessions), engine.ctx - limits.new)
    batch = max(1, len(free) // 32)  # slots that come free are filled together: chunks cost launches

    def fill() -> list[Stream]:
        """Begin with prompts alone, a forward after the other."""
        filled: list[Stream] = []
        while fresh := begin(limits.rows - len(engine.sessions)):
            engine.launch(work_of((), fresh))
            filled += fresh
        return filled

    order = fill()
    while order:
        draws = engine.sample([Pick(s.slot, s.draw) for s in order])
        # The order of the forward is that of the draws: a stream that ended is drawn for once more, and dropped behind that.
        going: list[Stream] = []
        fresh = []
        if chained:
            going = [s for s in order if not s.done and len(s.tokens) + 1 < limits.new]
            fresh = begin(limits.rows - len(going)) if len(free) >= batch or not going else []
            if going or fresh:
                engine.launch(work_of(going, fresh))
        for stream, one in zip(order, draws.wait(), strict=True):
            if stream.done:
                continue
            token = one.token
            tokens = stream.tokens
            tokens.append(token)
            known += 1
            count = len(tokens)
            if token in stops or count >= limits.new or (count % LOOKED_AFTER == 0 and repeats(tokens)):
                stream.done = True
                engine.truncate(stream.slot, 0)
                free.append(stream.slot)
        now = time.monotonic()
        if now >= limits.deadline or known >= limits.tokens:
            break
        if not chained:
            going = [s for s in order if not s.done]
            fresh = begin(limits.rows - len(going)) if free else []
            if going or fresh:
                engine.launch(work_of(going, fresh))
        order = going + fresh or fill()  # all may have ended in one step
        if now - said >= 10:
            rate = (known - shown) / (now - said)
            say(f"generation: {known:,} tokens of {len(begun):,} prompts, {rate:,.0f} tok/s, {len(order)} under way")
            said, shown = now, known
    seconds = time.monotonic() - start
    say(f"generation: {known:,} tokens of {len(begun):,} prompts in {seconds:.1f} s, {known / max(seconds, 1e-9):,.0f} tok/s")
    return [stream for stream in begun if stream.tokens]


def repeats(tokens: Sequence[int]) -> bool:
    """Whether the last REPEATED tokens equal those some LONGEST_PERIOD or fewer before."""
    if len(tokens) <= REPEATED:
        return False
    data = array("i", tokens[-(REPEATED + LONGEST_PERIOD) :])
    size, text = data.itemsize, data.tobytes()
    tail, end = text[-REPEATED * size :], len(text) - 1
    while (at := text.rfind(tail, 0, end)) >= 0:
        if at % size == 0:
            return True
        end = at + len(tail) - 1
    return False


def in_loop(tokens: Tokens) -> npt.NDArray[np.bool_]:
    """For each token whether it is the end of a run of IN_LOOP that repeats those some LONGEST_PERIOD or fewer before."""
    found = np.zeros(len(tokens), np.bool_)
    place = np.arange(len(tokens))
    for period in range(1, min(LONGEST_PERIOD, len(tokens) - IN_LOOP) + 1):
        differs = np.ones(len(tokens), np.bool_)
        differs[period:] = tokens[period:] != tokens[:-period]
        found |= place - np.maximum.accumulate(np.where(differs, place, -1)) >= IN_LOOP
    return found


@dataclass(frozen=True)
class Answers:
    """Streams one behind another. Stream i is tokens[offset[i] : offset[i + 1]], its prompt the first `prompt[i]` of these."""

    tokens: Tokens
    offset: npt.NDArray[np.int64]  # [streams + 1]
    prompt: Tokens
    greedy: npt.NDArray[np.bool_]
    kind: Tokens  # index into KINDS
    held: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, streams: Sequence[Stream]) -> Answers:
        """Those with two tokens at least: a draft begins behind the first."""
        kept = [s for s in streams if len(s.tokens) > 1]
        lengths = [len(s.prompt) + len(s.tokens) for s in kept]
        whole = array("i")
        for stream in kept:
            whole.extend(stream.prompt)
            whole.extend(stream.tokens)
        return cls(
            np.array(whole, np.int32), np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            np.array([len(s.prompt) for s in kept], np.int32), np.array([s.greedy for s in kept], np.bool_),
            np.array([KINDS.index(s.kind) for s in kept], np.int32), np.array([s.held for s in kept], np.bool_),
        )  # fmt: skip

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each stream, prompt and answer."""
        return np.diff(self.offset)

    def save(self, path: Path) -> None:
        """Keep them in a .npz."""
        np.savez(
            path, tokens=self.tokens, offset=self.offset, prompt=self.prompt, greedy=self.greedy, kind=self.kind, held=self.held
        )

    @classmethod
    def load(cls, path: Path) -> Answers:
        """What `save` wrote."""
        with np.load(path) as found:
            return cls(**{name: found[name] for name in found.files})
