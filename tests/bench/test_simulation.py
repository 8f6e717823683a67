"""The simulation: the real scheduler runs in it, nothing is lost, and routers differ as they must."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench import simulate as command
from bench.simulation.backend import SimBackend
from bench.simulation.boxes import ExactBox
from bench.simulation.calibrate import calibrate
from bench.simulation.coarse import Factors
from bench.simulation.costs import DEFAULTS, StepCosts, load_costs, save_costs
from bench.simulation.figures import Figures, figures_of, jain
from bench.simulation.routing import POLICIES
from bench.simulation.run import Plan, Trail, simulate
from bench.simulation.traffic import Ask, Session, Traffic
from bench.simulation.validate import TOLERANCE, published, replayed
from scheduler import Scheduler, Work
from scheduler.fake import ManualClock

COSTS = DEFAULTS["h200-qwen3-8b"]
SMALL = Traffic(kind="agents", ctx=16_384, users=8, agent_prompt=2_000)


def plan(**changes: Any) -> Plan:
    values: dict[str, Any] = {"costs": COSTS, "traffic": SMALL, "slots": 8, "requests": 100, "rate": 4.0}
    return Plan(**{**values, **changes})


def run(**changes: object) -> Trail:
    return simulate(plan(**changes))


@pytest.fixture(scope="module")
def four() -> dict[str, Figures]:
    return {policy: figures_of(run(boxes=4, policy=policy, requests=120, rate=12.0)) for policy in POLICIES}


@pytest.mark.parametrize("coarse", [None, Factors()])
def test_a_seed_fixes_everything(coarse: Factors | None) -> None:
    first, again, other = (run(boxes=2, seed=seed, coarse=coarse) for seed in (3, 3, 4))
    assert first.done == again.done
    assert first.done != other.done


@pytest.mark.parametrize("kind", ["agents", "chat", "mixed"])
@pytest.mark.parametrize("coarse", [None, Factors()])
@pytest.mark.parametrize("rate", [0.0, 4.0])
def test_every_request_ends_once_and_tokens_add_up(kind: str, coarse: Factors | None, rate: float) -> None:
    trail = run(traffic=replace(SMALL, kind=kind), coarse=coarse, rate=rate, boxes=2)
    assert sorted(one.request.id for one in trail.done) == list(range(100))
    assert not any(one.failed for one in trail.done)
    assert all(0 <= one.cached < one.request.prompt for one in trail.done)
    assert all(one.request.arrival < one.first_token <= one.end for one in trail.done)
    figures = figures_of(trail)
    assert figures.completed == figures.sent == 100
    assert 0.0 < figures.utilisation <= 1.0


def test_the_device_evaluates_what_was_not_cached_and_each_answer_but_its_last_token() -> None:
    trail = run()
    (box,) = trail.boxes
    assert isinstance(box, ExactBox)
    wanted = sum(one.request.prompt - one.cached + one.request.answer - 1 for one in trail.done)
    assert box.backend.evaluated == wanted


def test_it_is_the_scheduler_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = 0
    step = Scheduler.step

    def counted(self: Scheduler) -> object:
        nonlocal steps
        steps += 1
        self.check()
        return step(self)

    monkeypatch.setattr(Scheduler, "step", counted)
    trail = run(requests=20)
    (box,) = trail.boxes
    assert isinstance(box, ExactBox)
    assert 0 < box.steps == box.backend.launches <= steps
    assert box.tiers.keys() >= {"memory-token", "fork"}


def test_a_step_takes_what_the_table_says() -> None:
    costs = replace(COSTS, chains=False)
    clock = ManualClock()
    backend = SimBackend(2, 4096, costs, clock)
    backend.launch([Work(0, range(1000), True)])
    assert clock.now == pytest.approx(costs.seconds(0, 0, 1000, 1000 * 999 / 2))
    before = clock.now
    backend.launch([Work(0, [7], True)])
    assert clock.now - before == pytest.approx(costs.seconds(1, 1001, 0, 0.0))


def test_affinity_reuses_more_than_taking_turns(four: dict[str, Figures]) -> None:
    for sticky in ("affinity", "affinity-least"):
        assert four[sticky].repeated_share > four["round-robin"].repeated_share + 0.1
        assert four[sticky].cached_share > four["round-robin"].cached_share


def test_a_fallback_spreads_better_than_a_hash(four: dict[str, Figures]) -> None:
    assert four["affinity-least"].busiest < four["prefix-hash"].busiest
    assert four["least-loaded"].busiest < four["affinity"].busiest


def test_one_conversation_stays_on_its_box_or_is_evaluated_again_on_each() -> None:
    """Six turns, two boxes: in turn, each sees every other request and misses what the other one evaluated."""
    talk = [Session(0, 0, 0, 0, tuple(Ask(0, 1000, 100, 1.0, (i - 1,) if i else ()) for i in range(6)))]
    cached = {
        policy: [one.cached for one in simulate(plan(boxes=2, policy=policy, rate=0.0, clients=1), talk).done]
        for policy in ("affinity", "affinity-least", "round-robin")
    }
    assert cached["affinity"] == cached["affinity-least"] == [0, *(1100 * turn - 1 for turn in range(1, 6))]
    assert cached["round-robin"] == [0, 0, *(1100 * turn - 1 for turn in range(1, 5))]


def test_the_prefix_hash_sends_one_application_to_one_box() -> None:
    figures = figures_of(run(traffic=replace(SMALL, apps=1), boxes=4, policy="prefix-hash"))
    assert figures.busiest == 4.0


def test_a_slot_too_few_drives_conversations_out() -> None:
    assert figures_of(run(slots=2)).evictions > figures_of(run(slots=32)).evictions == 0


def test_the_coarse_box_is_near_the_scheduler() -> None:
    found = calibrate(plan(requests=200, rate=2.0))
    exact, coarse = found.exact, found.coarse
    assert coarse.cached_share == pytest.approx(exact.cached_share, rel=0.05)
    assert coarse.utilisation == pytest.approx(exact.utilisation, rel=0.15)
    assert coarse.tpot_s.mean == pytest.approx(exact.tpot_s.mean, rel=0.15)
    assert exact.model == "scheduler"
    assert coarse.model == "coarse"


def test_the_h200s_figures_come_out() -> None:
    """All but one of those that bench.on_card measured; docs/scaling.md tells of the others."""
    checks = published()[:7]
    assert sum(abs(check.deviation) <= TOLERANCE for check in checks) >= 6


def test_a_recorded_load_is_asked_again_at_the_servers_own_pace(tmp_path: Path) -> None:
    """Two turns of 400 and 560 tokens; the server's steps took twice what the table says."""
    turns = [(0, 400, 0), (1, 560, 439)]
    requests = [
        {"index": turn, "turn": turn, "prompt_tokens": prompt, "cached_tokens": cached, "output_tokens": 40}
        for turn, prompt, cached in turns
    ]
    step = "ds4batch_decode_step_seconds_"
    summary = {"mean": 1.0}
    result = {
        "per_request": requests, "config": {}, "server_delta": {step + "sum": 0.85, step + "count": 100.0},
        "ttft_ms": summary, "itl_ms": {"mean": 8.5}, "e2el_ms": summary, "output_throughput": 1.0, "duration_s": 1.0,
        "prompt_tokens": 960, "cached_tokens": 439,
    }  # fmt: skip
    (tmp_path / "load.json").write_text(json.dumps(result), encoding="utf-8")
    checks = {check.name: check for check in replayed(tmp_path / "load.json", COSTS, 4)}
    assert checks["cached share"].deviation == pytest.approx(0.0)
    assert checks["ITL mean, ms"].deviation == pytest.approx(0.0, abs=0.02)


def test_costs_survive_a_file(tmp_path: Path) -> None:
    save_costs(COSTS, tmp_path / "costs.json")
    assert load_costs(str(tmp_path / "costs.json")) == COSTS
    with pytest.raises(ValueError, match="ascend"):
        replace(COSTS, decode=((2, 1.0), (1, 1.0)))
    with pytest.raises(ValueError, match="no file"):
        load_costs("nothing")


def test_prices_rise_with_every_argument() -> None:
    costs: StepCosts = COSTS
    plain = costs.seconds(8, 8000, 100, 1e5)
    assert min(costs.seconds(80, 8000, 100, 1e5), costs.seconds(8, 9000, 100, 1e5)) > plain
    assert min(costs.seconds(8, 8000, 9000, 1e5), costs.seconds(8, 8000, 100, 2e5)) > plain


def test_jain() -> None:
    assert jain([1.0, 1.0]) == pytest.approx(1.0)
    assert jain([1.0, 0.0, 0.0, 0.0]) == pytest.approx(0.25)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--requests", "40", "--boxes", "1,2", "--rate", "3", "--model", "coarse", "--policy", "affinity,round-robin"]
    report = tmp_path / "report.json"
    assert command.main([*arguments, "--report", str(report), "--plots", str(tmp_path)]) == 0
    runs = json.loads(report.read_text(encoding="utf-8"))["runs"]
    assert [(one["figures"]["boxes"], one["figures"]["model"]) for one in runs] == [
        (1, "scheduler"),
        (2, "coarse"),
        (2, "coarse"),
    ]
    assert "the scheduler did not run in these boxes" in capsys.readouterr().out
    assert (tmp_path / "scaling-agents.png").stat().st_size > 10_000


def test_bad_options() -> None:
    for wrong in (["--policy", "nearest"], ["--slots", "0"], ["--ctx", "4096"], ["--costs", "nothing"]):
        with pytest.raises(SystemExit) as ended:
            command.main(wrong)
        assert ended.value.code == 2
