"""Whose a request is goes with it into the scheduler, and how each owner stands comes back in the reports."""

from __future__ import annotations

import msgspec

import ds4batch.messages as m
from ds4batch.engine.service import Service
from scheduler import Options
from scheduler.fake import FakeBackend, ManualClock
from tests.engine.test_service import Words


def service(max_queue: int = 4) -> Service:
    options = Options(mixed_prefill_quantum=32, idle_prefill_quantum=128, itl_budget=0.1, max_queue=max_queue)
    return Service(FakeBackend(1, 2000), Words(), ManualClock(), 1, options)


def send(engine: Service, id: int, owner: str, **rest) -> None:
    """As it comes over the socket."""
    sampling = m.Sampling(ignore_eos=True)
    submit = m.Submit(
        id=id, tokens=[5 + id] * 20, text="", max_tokens=4, sampling=sampling, arrival=0.0, reading=None, owner=owner, **rest
    )
    message = m.decode_to_engine(m.frame(submit)[m.HEADER.size :])
    assert isinstance(message, m.Submit)
    engine.handle(message)


def reports(engine: Service) -> list[m.Report]:
    told = []
    while engine.busy:
        told.append(engine.step())
    return told


def test_owners_limits_and_weights_reach_the_scheduler() -> None:
    engine = service()
    for i in range(3):
        send(engine, i, "a", owner_weight=1.0)
    send(engine, 3, "b", owner_weight=4.0, owner_limit=1)
    routed = [event.id for report in reports(engine) for event in report.events if isinstance(event, m.Routed)]
    assert routed == [0, 3, 1, 2]


def test_standings_are_in_the_reports_and_survive_their_encoding() -> None:
    engine = service()
    send(engine, 1, "a")
    send(engine, 2, "b")
    first, *_, last = reports(engine)
    assert first.stats is not None
    assert last.stats is not None
    assert {(one.owner, one.waiting, one.running) for one in first.stats.owners} == {("a", 0, 1), ("b", 1, 0)}
    decoded = m.decode_from_engine(m.frame(last)[m.HEADER.size :])
    assert isinstance(decoded, m.Report)
    assert decoded.stats is not None
    assert msgspec.to_builtins(decoded.stats.owners) == [["b", 0, 0, 24]]


def test_a_line_that_another_filled_is_open_to_who_has_less_than_a_share() -> None:
    engine = service(max_queue=4)
    for i in range(8):
        send(engine, i, "a")
    send(engine, 8, "b")
    events = [event for report in reports(engine) for event in report.events]
    refused = [event for event in events if isinstance(event, m.Failed)]
    assert [event.id for event in refused] == [5, 6, 7]
    assert {(event.status, event.message) for event in refused} == {(429, "the queue is full; retry later")}
    assert all(event.retry_after and event.retry_after >= 1 for event in refused)
    assert sum(isinstance(event, m.Finished) for event in events) == 6


def test_a_limit_or_weight_that_cannot_work_is_refused_by_name() -> None:
    engine = service()
    send(engine, 1, "a", owner_weight=0.0)
    (refused,) = [event for report in reports(engine) for event in report.events]
    assert isinstance(refused, m.Failed)
    assert (refused.status, refused.message) == (400, "owner_weight: 0.0 is not a number above 0")
