from __future__ import annotations

import shutil
import subprocess
from typing import Any

import pytest
import yaml

from tests.deploy.queries import DEPLOY, problems

PROMETHEUS = DEPLOY / "prometheus"
promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not on PATH (Debian: apt-get install prometheus)"
)


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load((PROMETHEUS / "rules.yml").read_text())["groups"] for rule in group["rules"]]


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule["alert"])
def test_alerts_name_only_what_is_exported(rule: dict[str, Any]) -> None:
    assert not problems(rule["expr"], frozenset({"up"}))
    assert rule["labels"]["severity"] in ("critical", "warning", "info")
    assert "$labels.instance" in rule["annotations"]["summary"]


def test_every_alert_is_tested_firing_and_silent() -> None:
    tests = yaml.safe_load((PROMETHEUS / "rules_test.yml").read_text())["tests"]
    seen = {(case["alertname"], bool(case["exp_alerts"])) for test in tests for case in test["alert_rule_test"]}
    assert seen == {(rule["alert"], firing) for rule in rules() for firing in (True, False)}


def test_alerts_select_the_job_that_is_scraped() -> None:
    (job,) = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())["scrape_configs"]
    (down,) = (rule["expr"] for rule in rules() if rule["alert"] == "Ds4batchDown")
    assert f'job="{job["job_name"]}"' in down
    assert job.get("metrics_path", "/metrics") == "/metrics"


@promtool
@pytest.mark.parametrize("arguments", ["check rules rules.yml", "check config prometheus.yml", "test rules rules_test.yml"])
def test_promtool(arguments: str) -> None:
    done = subprocess.run(["promtool", *arguments.split()], cwd=PROMETHEUS, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
