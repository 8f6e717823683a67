"""What systemd is told of the service, by its protocol of datagrams (sd_notify(3)): ready, alive, stopping.

The one place besides settings.py that reads what the process was started with: systemd names its socket in the environment.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Mapping

log = logging.getLogger(__name__)


class Notifier:
    """Sends states to `address`, a path or an abstract name that begins with @; to nobody where it is empty.

    `watchdog_seconds`: within this a sign of life is expected, 0 where none is.
    """

    def __init__(self, address: str, watchdog_seconds: float = 0.0) -> None:
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self.watchdog_seconds = watchdog_seconds if address else 0.0

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Notifier:
        """As the service manager says: NOTIFY_SOCKET, WATCHDOG_USEC, and WATCHDOG_PID, whose sign of life it is."""
        expected = environment.get("WATCHDOG_USEC", "")
        mine = environment.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        return cls(environment.get("NOTIFY_SOCKET", ""), int(expected) / 1e6 if mine and expected.isdigit() else 0.0)

    @property
    def is_service(self) -> bool:
        """Whether a service manager started this process."""
        return bool(self._address)

    def ready(self, status: str) -> None:
        """The service answers requests."""
        self._send(f"READY=1\nSTATUS={status}")

    def stopping(self) -> None:
        """The service has begun to end."""
        self._send("STOPPING=1\nSTATUS=stopping")

    async def run(self, alive: Callable[[], bool]) -> None:
        """Give signs of life while `alive`, until cancelled. That this task runs says that the event loop does."""
        while self.watchdog_seconds:
            if alive():
                self._send("WATCHDOG=1")
            await asyncio.sleep(self.watchdog_seconds / 3)

    def _send(self, state: str) -> None:
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
                sock.setblocking(False)
                sock.sendto(state.encode(), self._address)
        except OSError as error:
            log.warning("the service manager cannot be told %s: %s", state.partition("\n")[0], error)
