from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.queries import DEPLOY, TARGET, exported, grouped, problems, selectors

DASHBOARDS = sorted((DEPLOY / "grafana" / "dashboards").glob("*.json"))
IDS = [path.name for path in DASHBOARDS]


def board(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def panels(path: Path) -> list[dict[str, Any]]:
    return [panel for panel in board(path)["panels"] if panel["type"] != "row"]


def targets(path: Path) -> list[tuple[str, dict[str, Any]]]:
    return [(panel["title"], target) for panel in panels(path) for target in panel["targets"]]


def filled(expr: str) -> str:
    """As Grafana sends it."""
    return expr.replace("$__rate_interval", "5m").replace("$instance", ".*")


def test_both_dashboards_are_there() -> None:
    assert IDS == ["owners.json", "users.json"]


@pytest.mark.parametrize("path", DASHBOARDS, ids=IDS)
def test_queries_name_only_what_is_exported(path: Path) -> None:
    found = [(title, target["expr"], wrong) for title, target in targets(path) if (wrong := problems(filled(target["expr"])))]
    assert not found


@pytest.mark.parametrize("path", DASHBOARDS, ids=IDS)
def test_every_query_follows_the_chosen_server(path: Path) -> None:
    for title, target in targets(path):
        for name, matchers in selectors(target["expr"]).items():
            assert ("instance", "=~", "$instance") in matchers, (title, name)


@pytest.mark.parametrize("path", DASHBOARDS, ids=IDS)
def test_legends_name_only_labels_the_query_keeps(path: Path) -> None:
    for title, target in targets(path):
        assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= grouped(target["expr"]), title


@pytest.mark.parametrize("path", DASHBOARDS, ids=IDS)
def test_counters_are_read_by_rate_or_increase(path: Path) -> None:
    for title, target in targets(path):
        for name in selectors(target["expr"]):
            if name.endswith(("_total", "_bucket", "_sum", "_count")):
                assert len(re.findall(rf"\b(?:rate|increase)\({name}\{{", target["expr"])) == target["expr"].count(name + "{"), (
                    title
                )


@pytest.mark.parametrize("path", DASHBOARDS, ids=IDS)
def test_the_data_source_is_a_variable(path: Path) -> None:
    got = board(path)
    variables = {v["name"]: v for v in got["templating"]["list"]}
    assert variables["datasource"]["query"] == "prometheus"
    for panel in panels(path):
        for one in (panel, *panel["targets"]):
            assert one["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    (series, label) = re.fullmatch(r"label_values\((\w+), (\w+)\)", variables["instance"]["definition"]).groups()
    assert series in exported()
    assert label in TARGET


@pytest.mark.parametrize("path", DASHBOARDS, ids=IDS)
def test_panels_have_ids_and_places_of_their_own(path: Path) -> None:
    got = board(path)
    assert len({panel["id"] for panel in got["panels"]}) == len(got["panels"])
    taken: set[tuple[int, int]] = set()
    for panel in got["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
    assert got["schemaVersion"] >= 36


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not on PATH (Debian: apt-get install prometheus)")
def test_promtool_parses_every_query(tmp_path: Path) -> None:
    exprs = [filled(target["expr"]) for path in DASHBOARDS for _, target in targets(path)]
    rules = [{"record": f"panel:{i}", "expr": expr} for i, expr in enumerate(exprs)]
    file = tmp_path / "panels.json"  # JSON is YAML
    file.write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}))
    done = subprocess.run(["promtool", "check", "rules", "--lint=none", file], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(exprs)} rules found" in done.stdout


@pytest.mark.parametrize(
    ("expr", "wrong"),
    [
        ("sum (rate(vllm:no_such_total[5m]))", "vllm:no_such_total is not exported"),
        ('ds4batch_slots{tier="none"}', "ds4batch_slots has no label tier"),
        ('ds4batch_slots{state="asleep"}', "ds4batch_slots: state is never asleep"),
        ("sum by (state) (ds4batch_engine_up)", "ds4batch_engine_up has no label state to group by"),
        ("sum (ds4batch_engine_up", "unclosed ['('] in sum (ds4batch_engine_up"),
        ("summ (ds4batch_engine_up)", "unknown function summ"),
        ("histogram_quantile(0.5, sum (rate(vllm:iteration_tokens_total_bucket[5m])))", "a quantile without rate or le"),
    ],
)
def test_the_check_finds_what_is_wrong(expr: str, wrong: str) -> None:
    assert any(problem.startswith(wrong) for problem in problems(expr))
