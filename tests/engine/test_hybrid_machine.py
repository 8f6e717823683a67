"""Sessions whose state cannot be shortened, under any order of operations: what they hold always equals a cold run of their tokens."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ds4batch.engine.models.hybrid import HybridModel
from scheduler.backend import Work
from tests.engine.hybrid_models import DENSE, load, save
from tests.engine.models import engine_of

SLOTS = 3
CTX = 48
slots = st.integers(0, SLOTS - 1)
tokens = st.lists(st.integers(0, 2), min_size=1, max_size=5)  # few, so that cold runs can be kept


@cache
def model() -> HybridModel:
    with TemporaryDirectory() as directory:
        family, changes = DENSE
        save(family, changes | {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}, Path(directory))
        return load(Path(directory), ctx=CTX)


@cache
def cold(sequence: tuple[int, ...]) -> torch.Tensor:
    """The logits after these tokens in a session of their own."""
    engine = engine_of(model(), 1, CTX)
    engine.launch([Work(0, sequence, True)])
    return engine.logits(0).clone()


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self._threads = torch.get_num_threads()
        torch.set_num_threads(1)
        self.engine = engine_of(model(), SLOTS, CTX, page_tokens=16)
        self.held: list[list[int]] = [[] for _ in range(SLOTS)]
        self.saved = [0] * SLOTS

    @rule(work=st.dictionaries(slots, tokens, min_size=1))
    def extend(self, work: dict[int, list[int]]) -> None:
        fits = {slot: new for slot, new in work.items() if len(self.held[slot]) + len(new) <= CTX}
        if not fits:
            return
        self.engine.launch([Work(slot, new, True) for slot, new in fits.items()])
        for slot, new in fits.items():
            self.held[slot] += new
            assert torch.equal(self.engine.logits(slot), cold(tuple(self.held[slot])))

    @rule(slot=slots)
    def mark(self, slot: int) -> None:
        self.engine.mark(slot)
        self.saved[slot] = len(self.held[slot])

    @rule(slot=slots, share=st.floats(0, 1))
    def truncate(self, slot: int, share: float) -> None:
        self._cut(slot, round(share * len(self.held[slot])))

    @rule(slot=slots)
    def rewind(self, slot: int) -> None:
        self._cut(slot, self.saved[slot])

    @rule(slot=slots)
    def empty(self, slot: int) -> None:
        self._cut(slot, 0)

    def _cut(self, slot: int, length: int) -> None:
        possible = length in (0, self.saved[slot], len(self.held[slot]))
        assert self.engine.can_truncate(slot, length) == possible
        assert self.engine.truncate(slot, length) == possible
        if possible:
            del self.held[slot][length:]
            self.saved[slot] = min(self.saved[slot], length)

    @rule(source=slots, into=slots)
    def snapshot_into(self, source: int, into: int) -> None:
        """What a checkpoint does: the state as bytes, the keys and values page by page."""
        state, length = self.engine.pool.state, self.saved[source]
        assert state is not None
        if source == into or not length:
            return
        data = state.snapshot(source, len(self.held[source]), length)
        self._cut(into, 0)
        state.restore(into, data)
        session, given, pool = self.engine.sessions[source], self.engine.sessions[into], self.engine.pool
        given.pages += pool.take(given.pages_missing(length))
        for mine, theirs in zip(session.pages, given.pages, strict=False):
            pool.k[:, theirs] = pool.k[:, mine]
            pool.v[:, theirs] = pool.v[:, mine]
        given.tokens += session.tokens[:length]
        self.held[into] = self.held[source][:length]

    def teardown(self) -> None:
        torch.set_num_threads(self._threads)

    @invariant()
    def sessions_hold_what_they_were_given(self) -> None:
        assert [list(self.engine.tokens(slot)) for slot in range(SLOTS)] == self.held


TestMachine = Machine.TestCase
TestMachine.settings = settings(
    max_examples=120, stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
