"""What a cycle with drafts evaluates, commits, cuts and reports, and when there is one."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from scheduler_rig import TEXT, Reader, Rig

from scheduler import Options, Pick, Sampled, Verdict, Work
from scheduler.fake import END, FakeBackend, scripted
from scheduler.fake_drafts import Guesses, always, pattern

pytestmark = pytest.mark.usefixtures("either_device")


def drafting(guesses: Guesses, drafts: int = 2, always_on: bool = True, **changes) -> Rig:
    """A rig that drafts in every cycle."""
    rig = Rig(drafts=drafts, guesses=guesses, **changes)
    if always_on:
        rig.scheduler._speculation._pricing.next_drafts = lambda width, timed=True: True
    return rig


def say(prompt: str, answer: str, then: int | None = END):
    return scripted({tuple(TEXT.tokenise(prompt)): TEXT.tokenise(answer) + ([] if then is None else [then])})


def checks(rig: Rig) -> list[int]:
    """Drafts of each launch with a decode row."""
    return [row.drafts for launch in rig.backend.log for row in launch if len(row.tokens) == 1]


def test_right_drafts_are_committed_with_the_token_before_them():
    rig = drafting(always(), script=say("hello", "0123456789"))
    job = rig.answer("hello", max_tokens=10)
    assert (job.output.text, rig.ended(job).reason) == ("0123456789", "length")
    assert checks(rig) == [2, 2, 2]  # nine tokens in three forwards, behind the one that the prompt gave
    assert [(s.checked_rows, s.drafts, s.accepted) for s in rig.steps()][-3:] == [(1, 2, (1, 1))] * 3
    assert list(rig.backend.tokens(0)) == TEXT.tokenise("hello") + TEXT.tokenise("012345678")


def test_wrong_drafts_cost_nothing_but_their_rows():
    rig = drafting(always(False), script=say("hello", "0123456789"))
    job = rig.answer("hello", max_tokens=10)
    assert job.output.text == "0123456789"
    assert checks(rig) == [2] * 7 + [1, 0]
    assert sum(s.drafts for s in rig.steps()) == 15
    assert not any(sum(s.accepted) for s in rig.steps())
    assert list(rig.backend.tokens(0)) == TEXT.tokenise("hello") + TEXT.tokenise("012345678")


def test_a_draft_behind_a_wrong_one_counts_for_nothing():
    rig = drafting(pattern([True, False, True]), drafts=3, script=say("hello", "0123456789"))
    job = rig.answer("hello", max_tokens=9)
    assert job.output.text == "012345678"
    assert [s.accepted for s in rig.steps() if s.drafts] == [(1,)] * 4
    assert (rig.ended(job).drafts, rig.ended(job).drafts_accepted) == (sum(s.drafts for s in rig.steps()), 4)


@pytest.mark.parametrize("said", ["", "0", "012", "0123456789"])
@pytest.mark.parametrize("limit", [1, 3, 8, 20])
def test_a_job_knows_its_own_drafts(said, limit):
    rig = drafting(pattern([True, True, False]), drafts=3, script=say("hello", said))
    ended = rig.ended(rig.answer("hello", max_tokens=limit))
    assert ended.drafts == sum(s.drafts for s in rig.steps())
    assert ended.drafts_accepted == sum(sum(s.accepted) for s in rig.steps())


@pytest.mark.parametrize("drafts", [1, 2, 3])
def test_no_more_is_drafted_than_a_job_may_still_draw(drafts):
    for limit in range(1, 9):
        rig = drafting(always(), drafts=drafts, script=say("hello", "0123456789"))
        job = rig.answer("hello", max_tokens=limit)
        assert job.output.text == "0123456789"[:limit]
        evaluated = sum(len(row.tokens) + row.drafts for launch in rig.backend.log for row in launch)
        assert evaluated == 4 + limit - 1  # none in vain: all were right, and the last token is never evaluated


def test_the_contexts_end_is_a_limit_like_any_other():
    rig = drafting(always(), drafts=3, ctx=30, script=say("a" * 20, "0123456789" + "more"))
    job = rig.answer("a" * 20, max_tokens=1000)
    assert (rig.ended(job).reason, job.output.text) == ("length", "0123456789")
    assert len(rig.backend.tokens(0)) == 29


@pytest.mark.parametrize("said", ["", "0", "01", "012", "0123", "01234"])
def test_a_stop_token_ends_the_answer_wherever_it_lies_among_the_drafts(said):
    rig = drafting(always(), drafts=3, script=say("hello", said))
    job = rig.answer("hello", max_tokens=20)
    assert (job.output.text, rig.ended(job).reason, rig.ended(job).completion_tokens) == (said, "stop", len(said))
    assert list(rig.backend.tokens(0)) == TEXT.tokenise("hello") + TEXT.tokenise(said)


@pytest.mark.parametrize("said", ["0X", "01X", "012X", "0123X", "01234X"])
def test_a_stop_string_ends_the_answer_wherever_it_lies_among_the_drafts(said):
    rig = drafting(always(), drafts=3, script=say("hello", said + "and more"))
    job = rig.answer("hello", max_tokens=20, stop=["X"])
    assert (job.output.text, rig.ended(job).reason, rig.ended(job).completion_tokens) == (said[:-1], "stop", len(said))
    assert job.generated == TEXT.tokenise(said)
    assert list(rig.backend.tokens(0)) == TEXT.tokenise("hello") + TEXT.tokenise(said[:-1])


class Steering(Reader):
    """Notes how much it had read whenever its next token was drawn; a text ends its turn."""

    def __init__(self, until: str) -> None:
        super().__init__()
        self.until = until

    def push(self, sampled: Sampled) -> Verdict | None:
        super().push(sampled)
        return Verdict("tool_calls", len(self.tokens)) if self.text.endswith(self.until) else None


def test_a_steered_jobs_rows_are_drawn_one_after_the_other_as_their_texts_are_read():
    rig = drafting(always(), drafts=3, script=say("hello", "0123456789</call>"))
    job = rig.submit("hello", max_tokens=40, steered=True, output=Steering("</call>"))
    plain = rig.submit("hello", max_tokens=12)
    read, rows = [], []
    sample = rig.backend.sample

    def watched(picks: Sequence[Pick]):
        mine = [pick.row for pick in picks if pick.slot == job.slot]
        assert len(mine) <= 1
        if mine:
            read.append(len(job.output.tokens))
            rows.append(mine[0])
        return sample(picks)

    rig.backend.sample = watched
    rig.run()
    assert (job.output.text, rig.ended(job).reason) == ("0123456789</call>", "tool_calls")
    assert read == list(range(len(job.generated)))
    assert set(rows) == {0, 1, 2, 3}
    assert plain.output.text == "0123456789</"
    live = list(rig.backend.tokens(job.slot))
    whole = TEXT.tokenise("hello") + job.generated
    assert live == whole[: len(live)]
    assert len(live) >= len(whole) - 1


def test_draws_that_depend_on_one_another_are_made_one_after_the_other():
    rig = drafting(always(), drafts=3)
    job = rig.answer("hello", max_tokens=20, sampling=-1, ignore_eos=True)
    assert job.generated == rig.alone(job)
    assert sum(sum(s.accepted) for s in rig.steps()) > 10


def test_who_is_not_to_be_drafted_for_decodes_beside_those_who_are():
    rig = drafting(always(), drafts=2)
    jobs = [rig.submit(f"job {i}", max_tokens=13, ignore_eos=True, drafted=i == 1) for i in range(2)]
    rig.run()
    assert {row.slot for launch in rig.backend.log for row in launch if row.drafts} == {jobs[1].slot}
    assert all(job.generated == rig.alone(job) for job in jobs)


def test_nothing_is_asked_where_nobody_may_be_drafted_for():
    rig = drafting(always(), drafts=2)
    asked = []
    rig.scheduler._speculation._pricing.next_drafts = lambda width, timed=True: asked.append(width) or True
    rig.answer("hello", max_tokens=13, ignore_eos=True, drafted=False)
    assert not asked
    assert not any(checks(rig))
    assert rig.backend.counts.launches == 13


def test_prompts_are_read_beside_drafts_and_such_cycles_price_nothing():
    rig = drafting(always(), drafts=2, price=lambda work: 0.01)
    seen = []
    pricing = rig.scheduler._speculation._pricing
    observe = pricing.observe
    pricing.observe = lambda width, **rest: (seen.append(rest), observe(width, **rest))
    talker = rig.submit("hello", max_tokens=60, ignore_eos=True)
    rig.step()
    reader = rig.submit([7] * 200, max_tokens=5, ignore_eos=True)
    rig.run()
    mixed = [launch for launch in rig.backend.log if any(row.drafts for row in launch) and any(len(row.tokens) > 1 for row in launch)]
    assert mixed
    assert sum(one["seconds"] == 0.0 for one in seen) >= len(mixed)
    assert any(one["seconds"] > 0.0 for one in seen)
    assert all(job.generated == rig.alone(job) for job in (talker, reader))


def test_what_pricing_is_told_of_a_cycle():
    rig = drafting(pattern([True, False], [False, True], [True, True]), drafts=2, price=lambda work: 0.25)
    told = []
    pricing = rig.scheduler._speculation._pricing
    pricing.observe = lambda width, **rest: told.append((width, rest))
    jobs = [rig.submit(f"job {i}", max_tokens=30, ignore_eos=True) for i in range(2)]
    rig.run()
    steps = [s for s in rig.steps() if s.decode_rows]
    assert len(told) == len(steps)
    for (width, one), step in zip(told, steps, strict=True):
        assert (width, one["drafts"], one["accepted"]) == (step.decode_rows, step.drafts, sum(step.accepted))
        assert one["verified"] or not one["drafts"]
    assert sum(one["tokens"] for _, one in told) == sum(len(job.generated) - 1 for job in jobs)
    assert [one["made"] for _, one in told[:-1]] == [one["verified"] for _, one in told[1:]]


def test_prices_decide_and_plain_cycles_cost_what_they_ever_did():
    """Drafts that are always wrong make a cycle dearer: but for probes, it is not drafted."""

    def price(work: Sequence[Work]) -> float:
        return 0.010 + 0.004 * sum(row.drafts for row in work)

    rig = drafting(always(False), drafts=1, always_on=False, price=price, ctx=4096)
    job = rig.answer("hello", max_tokens=2000, ignore_eos=True)
    assert job.generated == rig.alone(job)
    stats = rig.scheduler.stats().pricing
    assert stats is not None
    (bucket,) = stats.buckets
    assert bucket.acceptance < 0.1
    assert bucket.plain_seconds == pytest.approx(0.010, rel=0.2)
    assert bucket.speculative_seconds == pytest.approx(0.014, rel=0.2)
    late = [s.drafts for s in rig.steps()][-1000:]
    assert sum(late) < 40
    assert rig.clock() - 1000.0 < 2000 * 0.0105


def test_right_drafts_win_and_the_answer_takes_fewer_forwards():
    rig = drafting(always(), drafts=1, always_on=False, price=lambda work: 0.010 + 0.002 * sum(row.drafts for row in work))
    job = rig.answer("hello", max_tokens=1000, ignore_eos=True)
    assert job.generated == rig.alone(job)
    assert rig.backend.counts.launches < 600
    assert rig.clock() - 1000.0 < 1000 * 0.0070


def test_a_drafter_that_fails_fails_those_it_drafted_for():
    rig = drafting(always(), drafts=2, slots=3)
    jobs = [rig.submit(f"job {i}", max_tokens=20, ignore_eos=True, drafted=i < 2) for i in range(3)]
    rig.step()
    rig.backend.fail_proposals()
    rig.run()
    for job in jobs[:2]:
        assert (rig.ended(job).status, rig.ended(job).message) == (500, "drafting failed: the drafter failed on demand")
        assert not rig.backend.tokens(job.slot)
    assert jobs[2].generated == rig.alone(jobs[2])
    again = rig.answer("job 0", max_tokens=20, ignore_eos=True)
    assert again.generated == rig.alone(again)


def test_a_forward_that_fails_with_drafts_in_it_fails_its_rows():
    rig = drafting(always(), drafts=2)
    job = rig.submit("hello", max_tokens=20, ignore_eos=True)
    rig.step()
    rig.backend.fail_next()
    rig.run()
    assert rig.ended(job).status == 500
    again = rig.answer("hello", max_tokens=20, ignore_eos=True)
    assert (rig.routed(again).cached_tokens, again.generated) == (0, rig.alone(again))


def test_a_cancelled_job_leaves_what_was_committed():
    rig = drafting(always(), drafts=3)
    job = rig.submit("hello", max_tokens=50, ignore_eos=True)
    for _ in range(4):
        rig.step()
    rig.scheduler.cancel(job.id, "client")
    rig.run()
    live = list(rig.backend.tokens(0))
    alone = TEXT.tokenise("hello") + rig.alone(job)
    assert live == alone[: len(live)]
    assert len(live) > 10
    again = rig.answer("hello", max_tokens=50, ignore_eos=True)
    assert again.generated == rig.alone(again)


class Broken(Reader):
    def push(self, sampled: Sampled) -> Verdict | None:
        if len(self.tokens) == 4:
            raise RuntimeError("unreadable")
        return super().push(sampled)


@pytest.mark.parametrize("steered", [False, True])
def test_an_output_that_fails_among_drafts_leaves_a_session_of_whole_tokens(steered):
    rig = drafting(always(), drafts=3)
    job = rig.submit("hello", max_tokens=50, ignore_eos=True, output=Broken(), steered=steered)
    other = rig.submit("other", max_tokens=20, ignore_eos=True)
    rig.run()
    assert rig.ended(job).status == 500
    assert other.generated == rig.alone(other)
    again = rig.answer("hello", max_tokens=50, ignore_eos=True)
    assert again.generated == rig.alone(again)


def test_pages_are_not_taken_from_anybody_for_drafts():
    rig = drafting(always(), drafts=3, slots=2, ctx=64, page_tokens=4, pages=17, lookahead=2)
    idle = rig.answer([9] * 24, max_tokens=1, ignore_eos=True)
    held = rig.backend.held(idle.slot).pages
    job = rig.answer([7] * 30, max_tokens=12, ignore_eos=True)
    assert job.generated == rig.alone(job)
    assert rig.backend.held(idle.slot).pages == held
    assert any(row.drafts for launch in rig.backend.log for row in launch)


def test_without_a_drafter_or_with_no_drafts_asked_for_nothing_is_drafted():
    for rig in (Rig(drafts=2), Rig(guesses=always())):
        job = rig.answer("hello", max_tokens=20, ignore_eos=True)
        assert job.generated == rig.alone(job)
        assert not any(checks(rig))
    assert rig.scheduler.stats().pricing is None
    with pytest.raises(ValueError, match="drafts: 9 is not in"):
        Options(mixed_prefill_quantum=16, idle_prefill_quantum=16, itl_budget=1.0, max_queue=1, drafts=9)


def test_the_fake_refuses_drafts_that_do_not_follow():
    backend = FakeBackend(1, 100, guesses=always())
    backend.launch([Work(0, [1, 2, 3], True)])
    (one,) = backend.sample([Pick(0, 0)]).wait()
    assert backend.propose([(0, one.token)], 2) == [2]
    for work in (Work(0, [one.token + 1], True, 1), Work(0, [one.token], True, 3), Work(0, [one.token, 5], True, 1)):
        with pytest.raises(ValueError, match="not proposed to follow"):
            backend.launch([work])
    backend.launch([Work(0, [one.token], True, 2)])
    with pytest.raises(RuntimeError, match="waited for"):
        backend.drafts(0)
    with pytest.raises(RuntimeError, match="neither accepted nor cut"):
        backend.mark(0)
    drawn = backend.sample([Pick(0, 0, row) for row in range(3)]).wait()
    assert [d.token for d in drawn[:2]] == list(backend.drafts(0))
    backend.accept(0, 1)
    assert list(backend.tokens(0)) == [1, 2, 3, one.token, drawn[0].token]
    assert backend.truncate(0, 5)
    assert backend.answer([1, 2, 3], 0, 3) == [one.token, drawn[0].token, drawn[1].token]
