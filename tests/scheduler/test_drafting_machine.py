"""The same promises where drafts are guessed, checked, right, wrong, cut and lost: an answer follows from its tokens."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import rule
from test_scheduler_machine import STEPS, ChainedMachine, EagerMachine, ElasticMachine, Machine, RecurrentMachine

from scheduler import Ended, Job, Progress, StepDone


class Drafting:
    """What a machine over a device with a drafter does besides. `right` of four drafts at a place are right, at another `right` of
    another four."""

    def __init__(self) -> None:
        self.right = 2
        super().__init__()

    def make(self, **changes) -> None:
        super().make(drafts=3, guesses=self.guess, **changes)  # type: ignore[misc]

    def guess(self, history, count) -> list[bool]:
        many = sum(history[-3:]) % (count + 2)
        return [(7 * len(history) + history[-1] + 5 * i) % 4 < self.right for i in range(min(many, count))]

    @rule(right=st.integers(0, 4))
    def guesses_become_better_or_worse(self, right):
        self.right = right

    @rule(really=st.integers(0, 5))
    def drafter_fails_next_time(self, really):
        self.rig.backend.fail_proposals(really == 5)

    @rule(forced=st.booleans())
    def it_is_worth_it_or_not(self, forced):
        """Prices decide about a test's cycles as chance would; forced, all draft."""
        pricing = self.rig.scheduler._speculation._pricing
        pricing.__dict__.pop("next_drafts", None)
        if forced:
            pricing.next_drafts = lambda width, timed=True: True

    def check_progress(self, events, live, flying, drawn, prefilling) -> None:
        """Whatever could go on did, by one token or more."""
        assert not prefilling or any(isinstance(e, Progress) for e in events)
        for job in live:
            before = flying.get(job.id, drawn.get(job.id))
            if job.id not in self.ended and before is not None:
                assert len(job.generated) + job.drawing > before or job.ending == "stop"
        for done in events:
            if isinstance(done, StepDone):
                assert sum(done.accepted) <= done.drafts <= 3 * done.checked_rows <= 3 * done.decode_rows

    def teardown(self):
        self.rig.backend.fail_proposals(0)
        super().teardown()


class DraftingMachine(Drafting, Machine):
    pass


class DraftingRecurrentMachine(Drafting, RecurrentMachine):
    def make(self) -> None:  # type: ignore[override]
        Machine.make(self, can_rewind=False, drafts=3, guesses=self.guess)

    def check_session(self, job: Job, event: Ended) -> None:
        """A stop string that is read behind the next launch leaves the drafts that were right."""
        live, whole = list(self.rig.backend.tokens(job.slot)), job.prompt + job.generated
        assert live[: len(whole)] == whole[: len(live)]


class DraftingRecurrentEagerMachine(Drafting, RecurrentMachine):
    def make(self) -> None:  # type: ignore[override]
        Machine.make(self, can_rewind=False, overlap=False, drafts=3, guesses=self.guess)


class DraftingEagerMachine(Drafting, EagerMachine):
    def make(self) -> None:  # type: ignore[override]
        Machine.make(self, overlap=False, drafts=3, guesses=self.guess)


class DraftingChainedMachine(Drafting, ChainedMachine):
    def make(self) -> None:  # type: ignore[override]
        Machine.make(self, chains=True, drafts=3, guesses=self.guess)


class DraftingElasticMachine(Drafting, ElasticMachine):
    def make(self) -> None:  # type: ignore[override]
        ElasticMachine.make(self, drafts=3, guesses=self.guess)

    check_progress = ElasticMachine.check_progress


class DraftingElasticChainedMachine(Drafting, ElasticMachine):
    def make(self) -> None:  # type: ignore[override]
        ElasticMachine.make(self, chains=True, drafts=3, guesses=self.guess)

    check_progress = ElasticMachine.check_progress


TestDrafting = DraftingMachine.TestCase
TestDrafting.settings = STEPS
TestDraftingRecurrent = DraftingRecurrentMachine.TestCase
TestDraftingRecurrent.settings = STEPS
TestDraftingRecurrentEager = DraftingRecurrentEagerMachine.TestCase
TestDraftingRecurrentEager.settings = STEPS
TestDraftingEager = DraftingEagerMachine.TestCase
TestDraftingEager.settings = STEPS
TestDraftingChained = DraftingChainedMachine.TestCase
TestDraftingChained.settings = STEPS
TestDraftingElastic = DraftingElasticMachine.TestCase
TestDraftingElastic.settings = STEPS
TestDraftingElasticChained = DraftingElasticChainedMachine.TestCase
TestDraftingElasticChained.settings = STEPS
