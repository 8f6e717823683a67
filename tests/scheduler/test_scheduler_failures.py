"""What fails takes down those it concerns and nobody else."""

import pytest
from scheduler_rig import Reader, Rig, options

from scheduler import BackendError, InvariantError, Options
from scheduler.backend import Unanswerable
from scheduler.fake import VOCABULARY

pytestmark = pytest.mark.usefixtures("either_device")


def test_a_failed_forward_fails_its_rows_and_empties_their_slots():
    rig = Rig(slots=3)
    talkers = [rig.submit(f"talker {i}", max_tokens=50, ignore_eos=True) for i in range(2)]
    rig.step()
    reader = rig.submit([7] * 900)
    rig.step()
    rig.backend.fail_next()
    rig.step()
    for job in (*talkers, reader):
        ended = rig.ended(job)
        assert (ended.reason, ended.status) == ("error", 500)
        assert "the device failed on demand" in (ended.message or "")
        assert not job.output.finished
    assert [slot.state for slot in rig.scheduler.stats().slots] == ["empty"] * 3
    assert rig.scheduler.stats().kv_usage == 0


def test_after_a_failed_forward_others_go_on_and_the_same_prompt_answers_alike():
    rig = Rig(slots=2)
    victim = rig.submit("victim")
    rig.backend.fail_next()
    rig.step()
    waiting = rig.submit("waiting")
    again = rig.submit("victim")
    rig.run()
    assert rig.ended(victim).status == 500
    assert rig.routed(again).cached_tokens == 0
    assert waiting.generated == rig.alone(waiting)
    assert again.generated == rig.alone(again)


def test_a_free_slot_survives_a_failed_forward():
    rig = Rig(slots=2)
    rig.answer("kept conversation")
    live = list(rig.backend.tokens(0))
    rig.submit("victim")
    rig.backend.fail_next()
    rig.run()
    assert list(rig.backend.tokens(0)) == live
    assert rig.scheduler.stats().slots[0].state == "idle"


def test_the_last_text_of_a_finished_answer_is_delivered_though_the_next_forward_fails():
    rig = Rig(slots=2)
    done = rig.submit("done", max_tokens=1, ignore_eos=True)
    other = rig.submit("other", max_tokens=9, ignore_eos=True)
    rig.step()
    rig.backend.fail_next()
    rig.run()
    assert (rig.ended(done).reason, rig.ended(other).reason) == ("length", "error")
    assert done.output.tokens == rig.alone(done)


def test_a_token_outside_the_vocabulary_fails_its_own_job_only():
    rig = Rig(slots=3)
    talker = rig.submit("talker", max_tokens=20, ignore_eos=True)
    rig.step()
    bad = rig.submit([5, VOCABULARY, 6])
    good = rig.submit("good")
    rig.run()
    ended = rig.ended(bad)
    assert (ended.reason, ended.status, ended.phase) == ("error", 400, "prefill")
    assert "outside the vocabulary" in (ended.message or "")
    assert talker.generated == rig.alone(talker)
    assert good.generated == rig.alone(good)


def test_a_decode_row_that_is_refused_is_the_servers_fault_and_stays_alone():
    rig = Rig(slots=2)
    bad, good = (rig.submit(prompt, max_tokens=20, ignore_eos=True) for prompt in ("bad", "good"))
    rig.step()
    rig.step()
    launch = rig.backend.launch

    def refusing(work):
        if any(row.slot == bad.slot for row in work):
            raise ValueError("no room")
        launch(work)

    rig.backend.launch = refusing
    rig.run()
    assert (rig.ended(bad).status, rig.ended(bad).phase) == (500, "decode")
    assert good.generated == rig.alone(good)


class Refusing:
    """Makes `sample` refuse one kind of sampling, or fail outright."""

    def __init__(self, backend, error: Exception) -> None:
        self.sample, self.error = backend.sample, error

    def __call__(self, picks):
        if any(pick.sampling == "bad" for pick in picks):
            raise self.error
        return self.sample(picks)


def test_a_sampling_that_is_refused_fails_its_own_job_only():
    rig = Rig(slots=2)
    rig.backend.sample = Refusing(rig.backend, ValueError("temperature is a word"))
    bad, good = rig.submit("bad one", sampling="bad"), rig.submit("good one")
    rig.run()
    assert (rig.ended(bad).status, rig.ended(bad).message) == (400, "sampling was refused: temperature is a word")
    assert good.generated == rig.alone(good)


def test_a_device_that_fails_while_sampling_fails_all_it_sampled():
    rig = Rig(slots=2)
    rig.backend.sample = Refusing(rig.backend, BackendError("gone"))
    jobs = [rig.submit("bad one", sampling="bad"), rig.submit("good one")]
    rig.run()
    assert [rig.ended(job).status for job in jobs] == [500, 500]
    assert rig.scheduler.stats().running == 0


@pytest.mark.parametrize("where", ["push", "finish"])
def test_an_output_that_breaks_fails_its_own_job_only(where):
    class Broken(Reader):
        def push(self, sampled):
            if where == "push" and len(self.tokens) == 3:
                raise RuntimeError("no such character")
            return super().push(sampled)

        def finish(self, reason):
            raise RuntimeError("no such character")

    rig = Rig(slots=2)
    bad = rig.submit("bad", output=Broken(), max_tokens=10, ignore_eos=True)
    good = rig.submit("good", max_tokens=20)
    rig.run()
    ended = rig.ended(bad)
    assert (ended.reason, ended.status) == ("error", 500)
    assert "no such character" in (ended.message or "")
    assert good.generated == rig.alone(good)
    assert rig.scheduler.stats().running == 0


def test_an_answer_that_cannot_be_given_is_a_bad_request_and_no_fault_in_the_log(caplog):
    class Lost(Reader):
        def push(self, sampled):
            if len(self.tokens) == 3:
                raise Unanswerable("tools: the form of the answer cannot be followed further")
            return super().push(sampled)

    rig = Rig(slots=2)
    bad = rig.submit("bad", output=Lost(), max_tokens=10, ignore_eos=True)
    good = rig.submit("good", max_tokens=20)
    rig.run()
    ended = rig.ended(bad)
    assert (ended.reason, ended.status) == ("error", 400)
    assert ended.message == "tools: the form of the answer cannot be followed further"
    assert good.generated == rig.alone(good)
    assert not caplog.records


def test_a_text_that_cannot_be_rendered_costs_the_text_not_the_slot():
    rig = Rig(slots=1)
    rig.text.render = None  # calling it raises TypeError
    job = rig.answer("hello")
    assert job.generated == rig.alone(job)
    again = rig.answer([*rig.backend.tokens(0), 9])
    assert rig.routed(again).tier == "memory-token"


def test_a_slot_that_cannot_be_emptied_fails_the_job_not_the_scheduler():
    rig = Rig(slots=1)
    rig.answer("hello")
    truncate = rig.backend.truncate
    rig.backend.truncate = lambda slot, length: False
    job = rig.answer("zzz")
    assert (rig.ended(job).status, rig.ended(job).message) == (500, "slot 0 could not be emptied")
    rig.backend.truncate = truncate
    after = rig.answer("zzz")
    assert after.generated == rig.alone(after)


def test_an_unknown_device_error_passes_through():
    rig = Rig()
    rig.submit("hello")

    def dead(work):
        raise RuntimeError("illegal memory access")

    rig.backend.launch = dead
    with pytest.raises(RuntimeError, match="illegal memory access"):
        rig.step()


def test_the_self_check_finds_a_session_that_changed_behind_its_back():
    rig = Rig(slots=1)
    rig.answer("hello")
    rig.backend.truncate(0, 2)
    with pytest.raises(InvariantError, match="slot 0"):
        rig.scheduler.check()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("mixed_prefill_quantum", 15),
        ("idle_prefill_quantum", 0),
        ("itl_budget", 0.0),
        ("idle_budget", float("nan")),
        ("max_queue", -1),
        ("stale_after", float(1 << 21)),
    ],
)
def test_an_option_that_cannot_work_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match=f"^{name}: "):
        options(**{name: value})


def test_options_without_defaults_must_be_given():
    with pytest.raises(TypeError):
        Options()  # type: ignore[call-arg]
