"""Sessions that are decoded with drafts, and the same ones without: drafters that are right where they are told to be, and the loop."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from ds4batch.engine.draft.drafter import Expected, Proposal, Tokens
from ds4batch.engine.engine import Engine
from ds4batch.engine.models.model import Model
from ds4batch.engine.rows import Span
from ds4batch.engine.sampler import Draw
from scheduler.backend import Pick, Work
from tests.engine.models import engine_of

Rights = Callable[[int, int], Sequence[bool]]
"""From a slot and a position: for each draft that is made there whether it is right."""


class Forced:
    """Knows each slot's answer and gives it away, or something else. Keeps what it is told."""

    def __init__(self, rights: Rights, wants_hidden: bool = False) -> None:
        self.answers: dict[int, list[int]] = {}  # by slot, all tokens of its session
        self.rights = rights
        self.wants_hidden = wants_hidden
        self.told: list[tuple[object, ...]] = []
        self.hidden: dict[tuple[int, int], torch.Tensor] = {}  # (slot, position) -> the row
        self.fails = False

    def propose(self, wants: Sequence[tuple[int, int]], tokens: Tokens, count: int) -> Proposal:
        if self.fails:
            raise RuntimeError("the drafter is out of order")
        found: dict[int, list[int]] = {}
        for slot, follow in wants:
            at = len(tokens(slot)) + 1
            answer = self.answers[slot]
            assert [*tokens(slot), follow] == answer[:at]
            rights = list(self.rights(slot, at))[: min(count, len(answer) - at)]
            found[slot] = [answer[at + i] if right else (answer[at + i] + 1) % 190 for i, right in enumerate(rights)]
        return Proposal(found)

    def expect(self, sessions: Sequence[Expected], tokens: Tokens) -> None:
        self.told.append(("expect", *(s.slot for s in sessions)))

    def note(self, spans: Sequence[Span], hidden: torch.Tensor) -> None:
        for span in spans:
            self.told.append(("note", span.slot, span.start, span.rows, span.drafts))
            for i in range(span.rows):
                self.hidden[span.slot, span.start + i] = hidden[span.row + i].clone()

    def cut(self, slot: int, length: int) -> None:
        self.told.append(("cut", slot, length))

    def fork(self, source: int, target: int, length: int) -> None:
        self.told.append(("fork", source, target, length))

    def replaced(self, slot: int, length: int) -> None:
        self.told.append(("replaced", slot, length))


def drafting(model: Model, slots: int, ctx: int, drafter: Forced, drafts: int, **rest: object) -> Engine:
    """An engine like engine_of's, with a drafter."""
    plain = engine_of(model, slots, ctx, **rest)  # type: ignore[arg-type]
    plain.pool.state = model.new_state(slots, drafts)
    return Engine(model, plain.pool, slots, ctx, plain.path, drafter=drafter)


@dataclass
class Decoded:
    """One session: its tokens, and the logits that each of its generated ones was drawn from."""

    tokens: list[int]
    logits: list[torch.Tensor] = field(default_factory=list)


def plainly(model: Model, prompt: list[int], draw: Draw, count: int, ctx: int, **rest: object) -> Decoded:
    """`count` tokens behind a prompt, one by one, in an engine of its own."""
    engine = engine_of(model, 1, ctx, **rest)  # type: ignore[arg-type]
    engine.launch([Work(0, prompt, True)])
    found = Decoded(list(prompt))
    for i in range(count):
        found.logits.append(engine.logits(0).clone())
        (one,) = engine.sample([Pick(0, draw)]).wait()
        found.tokens.append(one.token)
        if i + 1 < count:
            engine.launch([Work(0, [one.token], True)])
    return found


def cycle(engine: Engine, found: dict[int, Decoded], draws: dict[int, Draw], drafts: dict[int, int], most: dict[int, int]) -> None:
    """One forward of all sessions of `found`, which end in a token that is not evaluated, with so many of their drafts.

    Takes at most `most` tokens of each; what is drawn together must not depend on one another.
    """
    engine.launch([Work(slot, [one.tokens[-1]], True, drafts.get(slot, 0)) for slot, one in found.items()])
    picks = [Pick(slot, draws[slot], row) for slot in found for row in range(1 + drafts.get(slot, 0))]
    drawn = dict(zip([(p.slot, p.row) for p in picks], engine.sample(picks).wait(), strict=True))
    for slot, one in found.items():
        right, given = 0, engine.drafts(slot)
        assert len(given) == drafts.get(slot, 0)
        while True:
            one.logits.append(engine._row(slot, right).clone())
            one.tokens.append(drawn[slot, right].token)
            if right == len(given) or right + 1 == most[slot] or one.tokens[-1] != given[right]:
                break
            right += 1
        if given:
            engine.accept(slot, right)
            assert torch.equal(engine.logits(slot), one.logits[-1])
            assert engine.truncate(slot, len(engine.tokens(slot)))
            assert torch.equal(engine.logits(slot), one.logits[-1])
        assert [*engine.tokens(slot), one.tokens[-1]] == one.tokens


def speculatively(
    engine: Engine,
    prompts: dict[int, list[int]],
    draws: dict[int, Draw],
    counts: dict[int, int],
    drafts: int,
    rnd: random.Random,
    plain: float = 0.0,
) -> dict[int, Decoded]:
    """`counts` tokens behind each prompt, all sessions together; a share `plain` of the cycles checks nothing."""
    engine.launch([Work(slot, prompt, True) for slot, prompt in prompts.items()])
    found = {slot: Decoded(list(prompt), [engine.logits(slot).clone()]) for slot, prompt in prompts.items()}
    for slot, one in zip(prompts, engine.sample([Pick(slot, draws[slot]) for slot in prompts]).wait(), strict=True):
        found[slot].tokens.append(one.token)
    while going := [slot for slot in prompts if len(found[slot].logits) < counts[slot]]:
        rnd.shuffle(going)
        left = {slot: counts[slot] - len(found[slot].logits) for slot in going}
        proposed = dict.fromkeys(going, 0)
        if rnd.random() >= plain:
            made = engine.propose([(slot, found[slot].tokens[-1]) for slot in going], drafts)
            proposed = {slot: min(n, left[slot] - 1) for slot, n in zip(going, made, strict=True)}
        cycle(engine, {slot: found[slot] for slot in going}, draws, proposed, left)
    return found


def assert_same(found: Decoded, expected: Decoded) -> None:
    """Equal tokens from equal bits of all logits."""
    assert found.tokens == expected.tokens
    assert len(found.logits) == len(expected.logits)
    for at, (one, other) in enumerate(zip(found.logits, expected.logits, strict=True)):
        assert torch.equal(one, other), f"the logits of generated token {at} differ"
