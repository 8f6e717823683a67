"""A server that checks keys, behind the proxies' files and under Prometheus's."""

from __future__ import annotations

import json
import shutil
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.deploy.queries import DEPLOY
from tests.deploy.test_proxies import CADDY, client, command, free_port, haproxy_file, started, with_caddy, with_haproxy

SERVER_TESTS = str(DEPLOY.parent / "tests" / "server")
PROMETHEUS = shutil.which("prometheus")


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any]]:
    sys.path.insert(0, SERVER_TESTS)
    try:
        from keyed import guarded
    finally:
        sys.path.remove(SERVER_TESTS)
    with guarded(tmp_path_factory.mktemp("keys")) as both:
        yield both


def check(port: int, plain: bool, ring: Any) -> None:
    """Keys pass in both headers, and as a password; so do the answers to those who have none."""

    def ask(path: str, headers: dict[str, str]) -> tuple[int, str]:
        connection = client(port, plain)
        try:
            connection.request("GET", path, headers=headers)
            answer = connection.getresponse()
            answer.read()
            return answer.status, answer.headers.get("WWW-Authenticate", "")
        finally:
            connection.close()

    from keyed import basic, bearer

    for headers in (bearer(ring.user), {"x-api-key": ring.user}):
        assert ask("/v1/models", headers) == (200, "")
        assert ask("/status.json", headers) == (403, "")
    assert ask("/", basic(ring.admin)) == (200, "")
    assert ask("/v1/models", {}) == (401, 'Bearer realm="ds4batch"')
    assert ask("/", {})[1].startswith("Basic ")
    assert ask("/metrics", bearer(ring.admin))[0] == 404


@with_haproxy
def test_haproxy_passes_keys(front: tuple[Any, Any], tmp_path: Path) -> None:
    server, ring = front
    port = free_port()
    box: Any = SimpleNamespace(server_port=server.port)
    with started(command(haproxy_file(tmp_path, (box, box), port)), port):
        check(port, False, ring)


@with_caddy
def test_caddy_passes_keys(front: tuple[Any, Any], tmp_path: Path) -> None:
    server, ring = front
    port = free_port()
    text = (DEPLOY / "caddy" / "Caddyfile").read_text()
    text = text.replace("box.lan {", f"http://127.0.0.1:{port} {{").replace("\ttls internal\n", "")
    file = tmp_path / "Caddyfile"
    file.write_text("{\n\tadmin off\n}\n" + text.replace("127.0.0.1:8000", f"127.0.0.1:{server.port}"))
    run = [str(CADDY), "run", "--adapter", "caddyfile", "--config", str(file)]
    with started(run, port, {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}):
        check(port, True, ring)


@pytest.mark.skipif(PROMETHEUS is None, reason="prometheus is not installed")
def test_prometheus_scrapes_with_a_key_of_admin_scope(front: tuple[Any, Any], tmp_path: Path) -> None:
    server, ring = front
    text = (DEPLOY / "prometheus" / "prometheus.yml").read_text()
    credentials = tmp_path / "key"
    credentials.write_text(ring.admin + "\n")  # as `ds4batch keys add ... > key` leaves it
    for line in ("authorization:", "  credentials_file:"):
        assert f"    #{line}" in text
        text = text.replace(f"    #{line}", f"    {line}")
    text = text.replace("/etc/prometheus/ds4batch.key", str(credentials)).replace("interval: 15s", "interval: 1s")
    (tmp_path / "prometheus.yml").write_text(text)
    shutil.copy(DEPLOY / "prometheus" / "rules.yml", tmp_path)
    (tmp_path / "targets.yml").write_text(json.dumps([{"targets": [f"127.0.0.1:{server.port}"]}]))
    port = free_port()
    run = [str(PROMETHEUS), f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data"]
    with started([*run, f"--web.listen-address=127.0.0.1:{port}"], port):
        assert up(port) == "1"


def up(port: int) -> str:
    """The scrape's success, as Prometheus has it."""
    query = f"http://127.0.0.1:{port}/api/v1/query?" + urllib.parse.urlencode({"query": "up"})
    for _ in range(300):
        time.sleep(0.1)
        try:
            with urllib.request.urlopen(query, timeout=5) as answer:
                found = json.load(answer)["data"]["result"]
        except OSError:
            continue
        if found:
            return str(found[0]["value"][1])
    raise AssertionError("nothing was scraped")
