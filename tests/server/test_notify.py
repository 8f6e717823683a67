"""What the service manager is told, over a socket like its own."""

from __future__ import annotations

import asyncio
import os
import pathlib
import signal
import socket
import time
from collections.abc import Iterator

import pytest
from harness import PATIENCE, Server, running, until

from ds4batch.server.notify import Notifier


class Manager:
    """The receiving end."""

    def __init__(self, address: str | bytes) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.sock.settimeout(PATIENCE)
        self.sock.bind(address)

    def next(self) -> dict[str, str]:
        return dict(line.split("=", 1) for line in self.sock.recv(4096).decode().splitlines())

    def until(self, name: str) -> dict[str, str]:
        while name not in (got := self.next()):
            pass
        return got


@pytest.fixture
def manager(tmp_path: pathlib.Path) -> Iterator[Manager]:
    made = Manager(str(tmp_path / "notify"))
    yield made
    made.sock.close()


def address(manager: Manager) -> str:
    return str(manager.sock.getsockname())


def test_each_state_is_a_datagram(manager: Manager) -> None:
    notifier = Notifier(address(manager))
    notifier.ready("serving a model")
    notifier.stopping()
    assert manager.next() == {"READY": "1", "STATUS": "serving a model"}
    assert manager.next() == {"STOPPING": "1", "STATUS": "stopping"}


def test_an_abstract_address_begins_with_an_at_sign() -> None:
    name = f"ds4batch-test-{os.getpid()}"
    manager = Manager(b"\0" + name.encode())
    Notifier("@" + name).stopping()
    assert manager.next()["STOPPING"] == "1"
    manager.sock.close()


def test_signs_of_life_are_given_only_while_there_is_life(manager: Manager) -> None:
    alive, asked = True, 0

    def living() -> bool:
        nonlocal asked
        asked += 1
        return alive

    async def live() -> None:
        nonlocal alive, asked
        task = asyncio.create_task(Notifier(address(manager), 0.03).run(living))
        while asked < 3:
            await asyncio.sleep(0.001)
        alive, asked = False, 0
        while asked < 5:
            await asyncio.sleep(0.001)
        task.cancel()

    asyncio.run(live())
    manager.sock.setblocking(False)
    given = 0
    try:
        while manager.next() == {"WATCHDOG": "1"}:
            given += 1
    except BlockingIOError:
        pass
    assert given == 3


def test_a_manager_that_has_gone_or_does_not_read_holds_nobody_up(manager: Manager, tmp_path: pathlib.Path) -> None:
    Notifier(str(tmp_path / "nobody")).ready("x")
    notifier = Notifier(address(manager))
    for _ in range(5000):  # more than the socket holds
        notifier.ready("x" * 100)
    Notifier("").ready("x")


@pytest.mark.parametrize(
    ("environment", "seconds"),
    [
        ({}, 0.0),
        ({"WATCHDOG_USEC": "3000000"}, 0.0),
        ({"NOTIFY_SOCKET": "/x"}, 0.0),
        ({"NOTIFY_SOCKET": "/x", "WATCHDOG_USEC": "3000000"}, 3.0),
        ({"NOTIFY_SOCKET": "/x", "WATCHDOG_USEC": "3000000", "WATCHDOG_PID": str(os.getpid())}, 3.0),
        ({"NOTIFY_SOCKET": "/x", "WATCHDOG_USEC": "3000000", "WATCHDOG_PID": "1"}, 0.0),
        ({"NOTIFY_SOCKET": "/x", "WATCHDOG_USEC": "soon"}, 0.0),
    ],
)
def test_the_environment_says_how_often(environment: dict[str, str], seconds: float) -> None:
    assert Notifier.from_environment(environment).watchdog_seconds == seconds


def test_the_server_says_when_it_is_ready_that_it_lives_and_that_it_stops(
    manager: Manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", address(manager))
    monkeypatch.setenv("WATCHDOG_USEC", "300000")
    with running({}, "--load", "0.5") as server:
        assert manager.until("READY")["STATUS"] == "serving fake-model"
        for _ in range(3):
            manager.until("WATCHDOG")
        server.process.send_signal(signal.SIGSTOP)
        assert quiet(manager)
        server.process.send_signal(signal.SIGCONT)
        manager.until("WATCHDOG")
        server.process.send_signal(signal.SIGTERM)
        manager.until("STOPPING")
        assert server.wait() == 0


def quiet(manager: Manager) -> bool:
    """Whether no sign of life comes any more, those aside that were under way."""
    manager.sock.settimeout(1.0)  # three times as long as one may take
    try:
        for _ in range(5):
            manager.next()
    except TimeoutError:
        return True
    finally:
        manager.sock.settimeout(PATIENCE)
    return False


def test_ready_is_not_said_before_the_model_has_loaded(manager: Manager, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", address(manager))
    server = Server({}, "--load", "60", wait=False)
    try:
        until(lambda: listening(server))
        manager.sock.setblocking(False)
        with pytest.raises(BlockingIOError):
            manager.next()
    finally:
        server.close()


def listening(server: Server) -> bool:
    """Whether the engine's process is there, which the front starts after it listens."""
    children = pathlib.Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children")
    time.sleep(0.05)
    return bool(children.read_text().strip())
