"""The status page of a server that checks keys, in a browser whose user types one into its dialog."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.e2e.test_status_page import CHROMIUM, Page, chromium

sys.path.insert(0, str(Path(__file__).parents[1] / "server"))

from keyed import guarded

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on the PATH")


class Visitor(Page):
    """A tab whose user answers the dialog for name and password with `passwords`, one by one, then gives it up."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse, *passwords: str) -> None:
        super().__init__(socket)
        self.passwords = list(passwords)
        self.asked = 0
        self._answers: set[asyncio.Task[None]] = set()

    def _note(self, told: dict[str, Any]) -> None:
        super()._note(told)
        params: dict[str, Any] = told.get("params", {})
        if told.get("method") == "Fetch.requestPaused":
            self._answer("Fetch.continueRequest", requestId=params["requestId"])
        elif told.get("method") == "Fetch.authRequired":
            assert params["authChallenge"]["scheme"] == "basic"
            self.asked += 1
            given = {"response": "CancelAuth"}
            if self.passwords:
                given = {"response": "ProvideCredentials", "username": "me", "password": self.passwords.pop(0)}
            self._answer("Fetch.continueWithAuth", requestId=params["requestId"], authChallengeResponse=given)

    def _answer(self, method: str, **params: Any) -> None:
        sending = asyncio.create_task(self._socket.send_json({"id": next(self._ids), "method": method, "params": params}))
        self._answers.add(sending)


def test_a_key_of_admin_scope_opens_the_page_and_its_stream(tmp_path: Path) -> None:
    async def look(browser: int, port: int, admin: str) -> None:
        base = f"http://127.0.0.1:{browser}/json"
        async with aiohttp.ClientSession() as session:
            async with session.put(f"{base}/new?about:blank") as answer:
                tab = await answer.json()
            async with session.ws_connect(tab["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                visitor = Visitor(socket, "wrong", admin)
                for domain in ("Page", "Runtime"):
                    await visitor.call(f"{domain}.enable")
                await visitor.call("Fetch.enable", handleAuthRequests=True)
                await visitor.call("Page.navigate", url=f"http://127.0.0.1:{port}/")
                await visitor.until("document.querySelectorAll('#slots tbody tr').length === 3")
                assert visitor.asked == 2  # the wrong one, then the right one: none for the stream
                await visitor.call("Fetch.disable")
                await visitor.call("Page.reload")
                await visitor.until("document.querySelectorAll('#slots tbody tr').length === 3")
                assert await visitor.js("fetch('/status.json').then((answer) => answer.status)") == 200
                assert await visitor.js("fetch('/v1/models').then((answer) => answer.status)") == 401  # a password opens no API
                assert not visitor.faults

    with chromium() as browser, guarded(tmp_path, {"batched_session": 3}) as (server, ring):
        asyncio.run(look(browser, server.port, ring.admin))
