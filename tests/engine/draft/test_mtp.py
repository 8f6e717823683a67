"""The MTP drafter: the drafts of the plain module over whole sequences, whatever happened to the sessions on the way."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import pytest
import torch
import torch.nn.functional as F

from ds4batch.engine.draft.mtp import MtpDrafter
from ds4batch.engine.draft.mtp_head import MtpWeights, draft_rows, rms_norm, shapes
from ds4batch.engine.draft.mtp_window import PAGE, RING, SEEN, Window
from ds4batch.engine.models.dense import DenseModel
from ds4batch.engine.rows import Span
from tests.engine.models import tiny_model

CTX = 1024


def random_head(model: DenseModel, seed: int = 1) -> MtpWeights:
    torch.manual_seed(seed)
    named = {
        name.split(".")[1]: torch.randn(shape) * shape[-1] ** -0.5 if len(shape) > 1 else 1 + 0.1 * torch.randn(shape)
        for name, shape in shapes(model.config).items()
    }
    return MtpWeights(**named)


class Rig:
    """A drafter beside sessions whose hidden states are random, a function of what a session holds."""

    def __init__(self, slots: int, **changes: object) -> None:
        self.model = tiny_model(ctx=CTX, **changes)
        self.weights = random_head(self.model)
        self.drafter = MtpDrafter(self.model, self.weights, slots)
        self.tokens: list[list[int]] = [[] for _ in range(slots)]
        self.hidden = [torch.zeros(0, self.model.config.hidden) for _ in range(slots)]

    def forward(self, work: Sequence[tuple[int, Sequence[int]]]) -> None:
        spans, rows = [], []
        for slot, tokens in work:
            made = torch.randn(len(tokens), self.model.config.hidden)
            spans.append(Span(slot, sum(map(len, rows)), len(self.tokens[slot]), len(tokens)))
            rows.append(made)
            self.tokens[slot] += tokens
            self.hidden[slot] = torch.cat([self.hidden[slot], made])
        self.drafter.note(spans, torch.cat(rows))

    def cut(self, slot: int, length: int) -> None:
        self.tokens[slot] = self.tokens[slot][:length]
        self.hidden[slot] = self.hidden[slot][:length]
        self.drafter.cut(slot, length)

    def propose(self, wants: Sequence[tuple[int, int]], count: int) -> Mapping[int, Sequence[int]]:
        proposal = self.drafter.propose(wants, lambda slot: self.tokens[slot], count)
        return {slot: list(proposal.values(slot)) for slot in proposal.tokens}

    def oracle(self, slot: int, token: int, count: int) -> list[int]:
        """The chain of drafts from the module over the whole session."""
        model, known = self.model, [*self.tokens[slot][1:], token]
        drafts: list[int] = []
        turns = model.rotations[:, 0]
        for depth in range(1, count + 1):
            hidden = F.pad(self.hidden[slot], (0, 0, 0, depth - 1))
            embedded = F.embedding(torch.tensor([*known, *drafts]), model.embed)
            rows = draft_rows(self.weights, model.config, turns, embedded[None], hidden[None], depth)
            drafts.append(int(model.head(rms_norm(rows[-1].hidden[0, -1:], self.weights.norm, model.config)).argmax()))
        return drafts


def test_drafts_are_those_of_the_plain_module() -> None:
    rig, rnd = Rig(3), random.Random(1)
    rig.forward([(0, [3, 5, 7]), (2, [rnd.randrange(199) for _ in range(PAGE + 9)])])
    for cycle in range(12):
        wants = [(slot, rnd.randrange(199)) for slot in ((0, 2) if cycle % 3 else (2,))]
        found = rig.propose(wants, 3)
        assert found == {slot: rig.oracle(slot, token, 3) for slot, token in wants}
        # what follows is the token the drafts followed, and then some; or another one
        rig.forward(
            [(slot, [token if cycle % 4 else token ^ 1, *[rnd.randrange(199)] * rnd.randrange(3)]) for slot, token in wants]
        )


def test_steps_without_drafts_are_made_up_for() -> None:
    rig, rnd = Rig(2), random.Random(2)
    rig.forward([(0, [1, 2]), (1, [3])])
    rig.propose([(0, 4), (1, 5)], 1)
    for _ in range(40):
        rig.forward([(0, [rnd.randrange(199)]), (1, [rnd.randrange(199)])])
    assert rig.propose([(1, 6), (0, 7)], 2) == {0: rig.oracle(0, 7, 2), 1: rig.oracle(1, 6, 2)}


def test_cuts_and_forks_are_followed() -> None:
    rig, rnd = Rig(2), random.Random(3)
    rig.forward([(0, [rnd.randrange(199) for _ in range(70)])])
    rig.propose([(0, 9)], 2)
    for length in (70, 69, 33, 1):
        rig.cut(0, length)
        rig.tokens[1], rig.hidden[1] = list(rig.tokens[0]), rig.hidden[0].clone()
        rig.drafter.fork(0, 1, length)
        assert rig.propose([(1, 8)], 2) == {1: rig.oracle(1, 8, 2)}
        rig.forward([(0, [7, 11]), (1, [12])])
        assert rig.propose([(0, 2), (1, 3)], 2) == {0: rig.oracle(0, 2, 2), 1: rig.oracle(1, 3, 2)}
        rig.cut(0, length)
    rig.cut(0, 0)
    assert rig.propose([(0, 8)], 1) == {}


def test_what_was_not_noted_is_not_guessed_from() -> None:
    rig = Rig(1)
    rig.forward([(0, list(range(50)))])
    rig.tokens[0] = list(range(100, 150)) + [1] * 40
    rig.drafter.replaced(0, 90)
    assert rig.propose([(0, 1)], 1) == {}
    rig.forward([(0, [2])])
    rig.hidden[0] = F.pad(rig.hidden[0][-1:], (0, 0, 90, 0))
    (found,) = rig.propose([(0, 1)], 1).values()
    assert len(found) == 1
    window = Window()
    assert window.extend(0, 10) == range(10)
    assert window.extend(30, 5) == range(30, 35)  # the ones between were restored
    assert (window.first, window.end, window.done) == (30, 35, 30)


def test_a_long_session_is_seen_through_its_last_pages() -> None:
    rig, rnd = Rig(1), random.Random(4)
    for count in (RING + 50, 3, PAGE):
        for chunk in range(0, count, 300):
            rig.forward([(0, [rnd.randrange(199) for _ in range(min(300, count - chunk))])])
        (found,) = rig.propose([(0, 5)], 3).values()
        # the same from a session that begins with the first page that is seen: positions differ by whole turns of nothing else
        window = rig.drafter._windows[0]
        length = len(rig.tokens[0])
        assert window.first == length - RING
        oldest = (length - 1) // PAGE - SEEN + 1
        fresh = Rig(1)
        fresh.tokens[0] = list(rig.tokens[0][: oldest * PAGE])
        fresh.drafter.replaced(0, oldest * PAGE)
        fresh.hidden[0] = rig.hidden[0][: oldest * PAGE]
        rest = rig.tokens[0][oldest * PAGE :]
        fresh.tokens[0] += rest
        fresh.drafter.note([Span(0, 0, oldest * PAGE, len(rest))], rig.hidden[0][oldest * PAGE :])
        assert fresh.propose([(0, 5)], 3) == {0: found}


@pytest.mark.parametrize("start", [0, 5])
def test_a_chunk_longer_than_the_window_leaves_its_end(start: int) -> None:
    window = Window()
    window.extend(0, start)
    assert window.extend(start, 3 * RING) == range(start + 2 * RING, start + 3 * RING)
    assert window.missing([0] * (start + 3 * RING), 1) == range(start + 2 * RING, start + 3 * RING)
