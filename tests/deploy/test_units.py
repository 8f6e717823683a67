"""Containers, provisioning and the systemd unit: what they name exists, and the times fit the server's."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from ds4batch.config import read_config
from ds4batch.server import run, watchdog
from ds4batch.settings import Settings
from tests.deploy.queries import DEPLOY

ROOT = DEPLOY.parent
DOCKER = DEPLOY / "docker"
LOGROTATE = shutil.which("logrotate", path="/usr/sbin:/usr/bin:/sbin:/bin")
SAVES_WITHIN = run.SAVE_SECONDS + run.HANDLER_STOP_SECONDS
FLAGS = {"--config", *("--" + name.replace("_", "-") for name in Settings.__dataclass_fields__)}


def services() -> dict[str, dict[str, Any]]:
    return yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]


def unit() -> dict[str, str]:
    lines = (DEPLOY / "systemd" / "ds4batch.service").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if re.match(r"[A-Za-z]+=", line))


def mounts(service: str) -> list[tuple[str, str]]:
    """Sources and places, of files and folders in this tree."""
    found = [volume.split(":") for volume in services()[service]["volumes"]]
    return [(parts[0], parts[1]) for parts in found if parts[0].startswith(".")]


def test_compose_mounts_exist() -> None:
    for service in services():
        for source, _ in mounts(service):
            assert (DOCKER / source).exists(), source


def test_compose_volumes_are_declared() -> None:
    declared = set(yaml.safe_load((DOCKER / "compose.yaml").read_text())["volumes"])
    used = {volume.split(":")[0] for service in services().values() for volume in service["volumes"]}
    assert {name for name in used if name.isalpha()} == declared


def test_compose_builds_from_this_tree() -> None:
    build = services()["server"]["build"]
    assert (DOCKER / build["context"]).resolve() == ROOT
    assert (ROOT / build["dockerfile"]).is_file()


def test_compose_gives_the_server_a_gpu_and_time_to_save() -> None:
    server = services()["server"]
    (device,) = server["deploy"]["resources"]["reservations"]["devices"]
    assert device["driver"] == "nvidia"
    assert device["capabilities"] == ["gpu"]
    minutes = re.fullmatch(r"(\d+)m", server["stop_grace_period"])
    assert minutes
    assert 60 * int(minutes[1]) > SAVES_WITHIN


def test_compose_publishes_on_loopback_by_default() -> None:
    for service in services().values():
        for port in service["ports"]:
            assert port.startswith(("127.0.0.1:", "${LISTEN:-127.0.0.1}:"))


def test_compose_and_the_unit_use_options_that_exist() -> None:
    used = [word.split("=")[0] for word in services()["server"]["command"] if word.startswith("--")]
    environment = (DEPLOY / "systemd" / "ds4batch.env").read_text()
    used += re.findall(r"--[a-z-]+", unit()["ExecStart"] + " " + environment)
    assert "--config" in used
    assert set(used) <= FLAGS


def test_images_are_pinned() -> None:
    base = re.findall(r"^FROM (\S+)", (DOCKER / "Dockerfile").read_text(), re.MULTILINE)
    images = [service["image"] for service in services().values() if "build" not in service]
    for image in base + images:
        assert re.search(r":v?\d+\.\d+\.\d+", image), image


def test_the_image_copies_what_exists_and_is_not_ignored() -> None:
    text = (DOCKER / "Dockerfile").read_text()
    copied = {source for line in re.findall(r"^COPY (.*)", text, re.MULTILINE) for source in line.split()[:-1]}
    ignore = (DOCKER / "Dockerfile.dockerignore").read_text().splitlines()
    assert copied == {line[1:] for line in ignore if line.startswith("!")}
    assert all((ROOT / source).exists() for source in copied)
    packages = re.search(r"include = (\[.*\])\n\n\[tool.setuptools.package-data", (ROOT / "pyproject.toml").read_text())
    assert packages
    assert {name.rstrip("*") for name in yaml.safe_load(packages[1])} <= copied


def test_the_image_runs_as_a_user_and_asks_for_health() -> None:
    lines = (DOCKER / "Dockerfile").read_text().splitlines()
    assert lines.index("USER ds4batch") < lines.index('ENTRYPOINT ["ds4batch"]')
    assert any("/health" in line for line in lines)


def test_grafana_finds_prometheus_and_the_dashboards() -> None:
    provisioning = DEPLOY / "grafana" / "provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yaml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    assert "prometheus" in services()
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "ds4batch.yaml").read_text())["providers"]
    places = {place: source for source, place in mounts("grafana")}
    assert (DOCKER / places[provider["options"]["path"]]).resolve() == DEPLOY / "grafana" / "dashboards"
    assert (DOCKER / places["/etc/grafana/provisioning"]).resolve() == provisioning


def test_prometheus_in_compose_scrapes_the_server_there() -> None:
    (group,) = yaml.safe_load((DOCKER / "targets.yml").read_text())
    (target,) = group["targets"]
    name, port = target.split(":")
    assert f"--port={port}" in services()[name]["command"]
    assert ("./targets.yml", "/etc/prometheus/targets.yml") in mounts("prometheus")


def test_the_unit_gives_the_server_time_to_save() -> None:
    seconds = re.fullmatch(r"(\d+)s", unit()["TimeoutStopSec"])
    assert seconds
    assert int(seconds[1]) > SAVES_WITHIN


def test_the_unit_waits_for_the_notifications_that_the_server_sends() -> None:
    assert (unit()["Type"], unit()["NotifyAccess"]) == ("notify", "main")
    seconds = re.fullmatch(r"(\d+)s", unit()["WatchdogSec"])
    assert seconds
    assert int(seconds[1]) >= 2 * watchdog.KILL_SECONDS  # a hanging engine is killed by the server first


def test_the_environment_file_has_what_the_unit_uses() -> None:
    text = (DEPLOY / "systemd" / "ds4batch.env").read_text()
    given = dict(line.split("=", 1) for line in text.splitlines() if line and not line.startswith("#"))
    assert set(re.findall(r"\$\{?(\w+)", unit()["ExecStart"])) == given.keys()


def test_the_sample_keeps_sessions_where_the_unit_lets_it_write() -> None:
    given = read_config(str(DEPLOY / "ds4batch.toml"))
    assert given["kv_disk_dir"].startswith(f"/var/lib/{unit()['StateDirectory']}/")
    rotated = (DEPLOY / "systemd" / "ds4batch.logrotate").read_text()
    assert f"/var/log/{unit()['LogsDirectory']}/" in rotated
    assert f"su {unit()['User']} {unit()['Group']}\n" in rotated


@pytest.mark.skipif(LOGROTATE is None, reason="logrotate is not installed")
def test_logrotate_takes_the_file(tmp_path: Path) -> None:
    text = (DEPLOY / "systemd" / "ds4batch.logrotate").read_text()
    file = tmp_path / "ds4batch"
    file.write_text(text.replace("    su ds4batch ds4batch\n", "").replace("/var/log/ds4batch", str(tmp_path / "log")))
    file.chmod(0o644)
    done = subprocess.run(
        [str(LOGROTATE), "-d", "-s", tmp_path / "state", file], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "error" not in done.stderr


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    text = (DEPLOY / "systemd" / "ds4batch.service").read_text()
    file = tmp_path / "ds4batch.service"
    file.write_text(text.replace("/opt/ds4batch/.venv/bin/ds4batch", "/bin/true"))  # it looks whether the program is there
    done = subprocess.run(["systemd-analyze", "verify", file], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "ds4batch.service" not in done.stderr
