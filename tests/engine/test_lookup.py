"""Lookup finds what a search from behind would find, whatever was cut and forked in between."""

from __future__ import annotations

import time

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ds4batch.engine.draft.lookup import SIZES, LookupDrafter, NGrams


def searched(tokens: list[int], follow: int, count: int) -> list[int]:
    """The drafts, found the slow way."""
    whole = [*tokens, follow]
    for n in SIZES:
        suffix = whole[-n:]
        for end in range(len(tokens), n - 1, -1):
            if len(whole) > n and tokens[end - n : end] == suffix:
                found = list(whole)
                while len(found) < len(whole) + count:
                    found.append(found[len(found) - (len(whole) - end)])
                return found[len(whole) :]
    return []


few = st.lists(st.integers(0, 2), max_size=30)


@given(few, st.integers(0, 2), st.integers(1, 8))
@settings(max_examples=300)
def test_it_finds_what_a_search_finds(tokens: list[int], follow: int, count: int) -> None:
    grams = NGrams()
    grams.extend(tokens)
    assert grams.continuation(follow, count) == searched(tokens, follow, count)


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.drafter = LookupDrafter(2)
        self.held: list[list[int]] = [[], []]

    @rule(slot=st.integers(0, 1), tokens=few)
    def extend(self, slot: int, tokens: list[int]) -> None:
        self.held[slot] += tokens

    @rule(slot=st.integers(0, 1), share=st.floats(0, 1))
    def cut(self, slot: int, share: float) -> None:
        length = round(share * len(self.held[slot]))
        del self.held[slot][length:]
        self.drafter.cut(slot, length)

    @rule(source=st.integers(0, 1), share=st.floats(0, 1))
    def fork(self, source: int, share: float) -> None:
        length = round(share * len(self.held[source]))
        self.held[1 - source] = self.held[source][:length]
        self.drafter.fork(source, 1 - source, length)

    @rule(slot=st.integers(0, 1), tokens=few)
    def replace(self, slot: int, tokens: list[int]) -> None:
        self.held[slot] = tokens
        self.drafter.replaced(slot, len(tokens))

    @rule(slot=st.integers(0, 1), follow=st.integers(0, 2))
    def draft(self, slot: int, follow: int) -> None:
        found = self.drafter.propose([(slot, follow)], lambda slot: self.held[slot], 4)
        assert list(found.tokens.get(slot, ())) == searched(self.held[slot], follow, 4)

    @invariant()
    def nothing_is_kept_of_what_was_cut(self) -> None:
        for slot in (0, 1):
            known = self.drafter._grams[slot].tokens
            assert known == self.held[slot][: len(known)]


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


def test_a_token_costs_the_same_however_long_the_session_is() -> None:
    """The best of several, so that other programs do not count."""
    drafter, session = LookupDrafter(1), [i * 7919 % 30011 for i in range(60000)]

    def cost(start: int) -> float:
        drafter.propose([(0, 5)], lambda slot: session[:start], 4)
        found = []
        for _ in range(5):
            begun = time.perf_counter()
            drafter._grams[0].extend(session[start : start + 1000])
            found.append(time.perf_counter() - begun)
            drafter.cut(0, start)
        return min(found)

    early = cost(1000)
    assert cost(50000) < 5 * early
