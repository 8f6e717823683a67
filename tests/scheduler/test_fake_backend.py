"""The fake keeps the contract that the tests of everything above it rely on."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler import BackendError, Pick, Work
from scheduler.fake import VOCABULARY, FakeBackend, FakeText, ManualClock, scripted


@given(st.text())
def test_any_text_survives_the_round_trip(text):
    fake = FakeText()
    assert fake.render(fake.tokenise(text)) == text


def test_a_text_has_several_tokenisations():
    fake = FakeText()
    assert fake.tokenise("t") + fake.tokenise("h") != fake.tokenise("th")
    assert fake.render(fake.tokenise("t") + fake.tokenise("h")) == fake.render(fake.tokenise("th"))


def test_a_token_follows_from_the_history_alone():
    backend = FakeBackend(2, 100)
    backend.launch([Work(0, [1, 2, 3], True)])
    backend.launch([Work(1, [1, 2], False)])
    backend.launch([Work(1, [3], True)])
    one, two = backend.sample([Pick(0, None), Pick(1, None)]).wait()
    assert one == two
    backend.launch([Work(0, [one.token], True)])
    assert backend.answer([1, 2, 3], None, 2) == [one.token, backend.sample([Pick(0, None)]).wait()[0].token]


def test_a_cut_session_goes_on_as_if_it_had_never_been_longer():
    backend = FakeBackend(2, 100)
    backend.launch([Work(0, [1, 2, 3, 4, 5], True), Work(1, [1, 2, 9], True)])
    assert backend.truncate(0, 2)
    backend.launch([Work(0, [9], True)])
    assert backend.sample([Pick(0, 1)]).wait() == backend.sample([Pick(1, 1)]).wait()


def test_logits_are_there_only_after_a_launch_that_wanted_them():
    backend = FakeBackend(1, 100)
    backend.launch([Work(0, [1, 2], False)])
    with pytest.raises(ValueError, match="slot 0 has no logits"):
        backend.sample([Pick(0, None)])
    backend.launch([Work(0, [3], True)])
    backend.truncate(0, 2)
    with pytest.raises(ValueError, match="slot 0 has no logits"):
        backend.sample([Pick(0, None)])


@pytest.mark.parametrize(
    "work",
    [
        [],
        [Work(0, [], True)],
        [Work(0, [1], True), Work(0, [2], True)],
        [Work(0, [1], True), Work(1, [VOCABULARY], True)],
        [Work(0, [1], True), Work(1, [-1], True)],
        [Work(0, [1], True), Work(1, [1] * 11, True)],
    ],
)
def test_work_that_is_wrong_changes_no_session(work):
    backend = FakeBackend(2, 10)
    backend.launch([Work(0, [5], True)])
    with pytest.raises(ValueError, match=r"nothing to do|twice|vocabulary|no room"):
        backend.launch(work)
    assert [list(backend.tokens(i)) for i in (0, 1)] == [[5], []]


def test_a_failure_on_demand_empties_the_slots_of_its_launch_only():
    backend = FakeBackend(2, 10)
    backend.launch([Work(0, [5], True), Work(1, [6], True)])
    backend.fail_next()
    with pytest.raises(BackendError):
        backend.launch([Work(1, [7], True)])
    assert [list(backend.tokens(i)) for i in (0, 1)] == [[5], []]
    backend.launch([Work(1, [7], True)])
    assert backend.counts == (2, 3, 0, 1)


def test_a_recurrent_session_can_only_be_emptied():
    backend = FakeBackend(1, 10, can_rewind=False)
    backend.launch([Work(0, [5, 6, 7], True)])
    assert not backend.truncate(0, 2)
    assert list(backend.tokens(0)) == [5, 6, 7]
    assert backend.truncate(0, 0)


def test_a_script_dictates_and_then_leaves_it_to_the_hash():
    script = scripted({(1, 2): [7, 8]})
    assert [script([1, 2]), script([1, 2, 7]), script([1, 2, 7, 8]), script([1, 2, 9]), script([3])] == [7, 8, None, None, None]
    assert FakeBackend(1, 10, script=script).answer([1, 2], None, 5, [8]) == [7]


def test_a_launch_takes_its_price_on_the_clock():
    clock = ManualClock()
    backend = FakeBackend(1, 10, clock=clock, price=lambda work: 0.25 * len(work))
    backend.launch([Work(0, [1], True)])
    assert clock() == 0.25
