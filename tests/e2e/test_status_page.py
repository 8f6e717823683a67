"""The status page in a browser, driven over the DevTools protocol.

`python -m tests.e2e.test_status_page` makes the pictures of docs/img anew.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest

from tests.server.harness import PATIENCE, RealServer, Server, running, until

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
PICTURES = ROOT / "docs" / "img"
MOST_BYTES = 200_000
SLOTS = 6
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --hide-scrollbars --remote-debugging-port=0 --no-first-run"
)

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on the PATH")


class Screen(NamedTuple):
    width: int
    height: int
    scheme: str = "light"


DESK, PHONE = Screen(1100, 900), Screen(390, 844, "dark")


@contextlib.contextmanager
def chromium() -> Iterator[int]:
    """A browser; its DevTools port."""
    assert CHROMIUM is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [CHROMIUM, *FLAGS.split(), f"--user-data-dir={profile}", "about:blank"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
        try:
            told = Path(profile, "DevToolsActivePort")
            yield int(until(lambda: told.exists() and told.read_text().split()).pop(0))
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with all that it started
            process.wait()


@pytest.fixture(scope="module")
def browser() -> Iterator[int]:
    with chromium() as port:
        yield port


def demo() -> RealServer:
    arguments = ["-m", str(DEMO), "--batched-session", str(SLOTS), "--ctx", "2048", "--draft", "lookup", "--threads", "1"]
    return RealServer(*arguments)


@pytest.fixture(scope="module")
def server() -> Iterator[RealServer]:
    if not DEMO.exists():
        pytest.fail(f"{DEMO} is missing; `make setup` fetches it")
    with contextlib.closing(demo()) as running:
        yield running


class Page:
    """One tab. `faults` are what its console complained of and its uncaught exceptions."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._ids = itertools.count(1)
        self.faults: list[str] = []

    async def call(self, method: str, **params: Any) -> Any:
        id = next(self._ids)
        await self._socket.send_json({"id": id, "method": method, "params": params})
        while True:
            told = await self._socket.receive_json(timeout=PATIENCE)
            if told.get("id") == id:
                assert "error" not in told, told
                return told["result"]
            self._note(told)

    def _note(self, told: dict[str, Any]) -> None:
        params = told.get("params", {})
        if told.get("method") == "Runtime.exceptionThrown":
            self.faults.append(str(params["exceptionDetails"]))
        elif told.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.faults.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")

    async def js(self, expression: str) -> Any:
        answer = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def until(self, expression: str) -> Any:
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            found = await self.js(expression)
            if found:
                return found
            await asyncio.sleep(0.05)
        raise AssertionError(f"not so: {expression}; the page says {await self.js('document.body.innerText')}")

    async def show(self, screen: Screen) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=screen.width, height=screen.height, deviceScaleFactor=1, mobile=screen.width < 600,
        )  # fmt: skip
        await self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": screen.scheme}])

    async def picture(self, path: Path) -> int:
        """The whole page as a file; its size."""
        size = (await self.call("Page.getLayoutMetrics"))["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        shot = await self.call("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
        return path.write_bytes(base64.b64decode(shot["data"]))


@contextlib.asynccontextmanager
async def page(browser: int, server: Server, screen: Screen = DESK) -> AsyncIterator[Page]:
    """The status page in a tab of its own."""
    base = f"http://127.0.0.1:{browser}/json"
    async with aiohttp.ClientSession() as session:
        async with session.put(f"{base}/new?about:blank") as answer:
            tab = await answer.json()
        try:
            async with session.ws_connect(tab["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                one = Page(socket)
                for domain in ("Page", "Runtime", "Log"):
                    await one.call(f"{domain}.enable")
                await one.show(screen)
                await one.call("Page.navigate", url=f"http://127.0.0.1:{server.port}/")
                await one.until("document.querySelector('#slots tbody tr') !== null")
                yield one
        finally:
            async with session.get(f"{base}/close/{tab['id']}"):
                pass


@contextlib.contextmanager
def busy(server: Server, count: int, tokens: int = 900) -> Iterator[None]:
    """Some streams under way."""
    with contextlib.ExitStack() as stack:
        for i in range(count):
            body = {
                "messages": [{"role": "user", "content": f"Count from {i} to a thousand. " + "Do it well. " * 20 * i}],
                "stream": True, "temperature": 0, "ignore_eos": True, "max_tokens": tokens,
            }  # fmt: skip
            stack.enter_context(contextlib.closing(server.send(body)))
        yield


def states(state: str) -> str:
    return f"document.querySelectorAll('#slots tbody tr[data-state={state}]').length"


SAYS = "document.getElementById('state').textContent"


def test_slots_appear_and_are_kept_up_to_date(browser: int, server: RealServer) -> None:
    async def look() -> None:
        async with page(browser, server) as tab:
            assert await tab.js("document.querySelectorAll('#slots tbody tr').length") == SLOTS
            assert await tab.js(SAYS) == "The engine is up."
            assert await tab.js("document.getElementById('model').textContent") == DEMO.stem
            with busy(server, 3):
                await tab.until(f"{states('decode')} === 3")
                doing = "document.querySelector('tr[data-state=decode] td:last-child').textContent"
                first = await tab.until(f"{doing}.startsWith('writing: ') && {doing}")
                await tab.until(f"{doing} !== {first!r}")
                width = "parseFloat(document.querySelector('tr[data-state=decode] .bar i').style.width)"
                assert 0 < await tab.js(width) < 100
                await tab.until("document.querySelector('#tiles .tile b').textContent === '3'")
            await tab.until(f"{states('decode')} === 0")
            await tab.until(f"{states('idle')} >= 3")
            line = "[...document.querySelectorAll('#tiles path')].every((one) => one.getAttribute('d').length > 5)"
            await tab.until(line)
            assert not await tab.js("document.getElementById('drafts').hidden")
            assert not tab.faults

    asyncio.run(look())


CONTRAST = """(() => {
  const light = (text) => {
    const [r, g, b] = text.match(/[\\d.]+/g).map((v) => v / 255).map((v) => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
    return .2126 * r + .7152 * g + .0722 * b;
  };
  const ratio = (a, b) => (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
  const card = light(getComputedStyle(document.querySelector('section')).backgroundColor);
  const back = light(getComputedStyle(document.body).backgroundColor);
  const found = ['#slots th', '#slots td', '.tile h2', '#state'].map((s) => light(getComputedStyle(document.querySelector(s)).color));
  return Math.min(...found.map((one) => ratio(one, card)), ratio(light(getComputedStyle(document.querySelector('#about')).color), back));
})()"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [320, 390, 768, 1280])
def test_it_fits_and_can_be_read(browser: int, server: RealServer, width: int, scheme: str, tmp_path: Path) -> None:
    async def look() -> None:
        async with page(browser, server, Screen(width, 800, scheme)) as tab:
            wide = "[document.documentElement.scrollWidth, document.body.scrollWidth, innerWidth]"
            whole, body, screen = await tab.js(wide)
            assert max(whole, body) <= screen == width
            dark = await tab.js("getComputedStyle(document.body).backgroundColor")
            assert dark == ("rgb(15, 18, 22)" if scheme == "dark" else "rgb(246, 247, 249)")
            assert await tab.js(CONTRAST) >= 4.5
            assert await tab.picture(tmp_path / "page.png") < MOST_BYTES
            assert not tab.faults

    asyncio.run(look())


def test_tables_and_news_are_marked_for_readers(browser: int, server: RealServer) -> None:
    async def look() -> None:
        async with page(browser, server) as tab:
            tree = (await tab.call("Accessibility.getFullAXTree"))["nodes"]
            named = {(node["role"]["value"], node.get("name", {}).get("value", "")) for node in tree if not node["ignored"]}
            assert ("table", "The sessions that are resident, and what is done in each") in named
            assert {("columnheader", "State"), ("rowheader", "0"), ("heading", "Slots")} <= named
            assert any(role == "image" and "Generated tokens/s over the last 5 minutes" in name for role, name in named)
            assert await tab.js("document.getElementById('state').getAttribute('aria-live')") == "polite"

    asyncio.run(look())


def test_it_says_when_the_engine_is_gone_and_when_it_is_back(browser: int, server: RealServer) -> None:
    async def look() -> None:
        async with page(browser, server) as tab:
            os.kill(server.health()["engine_pid"], signal.SIGKILL)
            await tab.until(f"{SAYS}.startsWith('The engine ended and is being started again: ')")
            assert "SIGKILL" in await tab.js(SAYS)
            assert await tab.js("document.querySelector('#slots td:last-child').textContent") == "no engine"
            assert await tab.js(states("empty")) == SLOTS
            await tab.until(f"{SAYS} === 'The engine is up.'")

    asyncio.run(look())


def test_it_says_when_the_server_is_gone_and_finds_the_next(browser: int) -> None:
    async def look() -> None:
        with contextlib.ExitStack() as stack:
            first = stack.enter_context(running({"batched_session": 2}))
            async with page(browser, first) as tab:
                await asyncio.to_thread(first.close)
                await tab.until(f"{SAYS}.startsWith('The connection to the server is lost')")
                assert await tab.js("document.getElementById('main').className") == "old"
                stack.enter_context(running({"batched_session": 3, "port": first.port}))
                await tab.until(f"{SAYS} === 'The engine is up.' && document.getElementById('main').className === ''")
                assert await tab.js("document.querySelectorAll('#slots tbody tr').length") == 3

    asyncio.run(look())


def test_a_listener_too_many_is_still_told(browser: int) -> None:
    async def look() -> None:
        with running({"batched_session": 1}) as server:
            async with aiohttp.ClientSession(f"http://127.0.0.1:{server.port}") as session, contextlib.AsyncExitStack() as stack:
                for _ in range(16):
                    answer = await stack.enter_async_context(session.get("/status/stream"))
                    assert answer.status == 200
                async with page(browser, server) as tab:
                    await tab.until(f"{SAYS}.startsWith('The engine is up. Live updates are not available now')")
                    await stack.aclose()
                    await tab.until(f"{SAYS} === 'The engine is up.'")

    asyncio.run(look())


def test_names_are_text_whatever_they_hold(browser: int) -> None:
    name = "<img src=x onerror=alert(1)><b>model</b>"

    async def look() -> None:
        with running({"served_name": name, "batched_session": 1}) as server:
            async with page(browser, server) as tab:
                assert await tab.js("document.getElementById('model').textContent") == name
                assert await tab.js("document.querySelectorAll('img, #model *').length") == 0
                assert not tab.faults

    asyncio.run(look())


async def pictures(browser: int, server: RealServer, into: Path) -> None:
    """Idle, busy, on a phone, and without the engine."""

    async def take(name: str, screen: Screen, ready: Callable[[Page], Awaitable[Any]]) -> None:
        async with page(browser, server, screen) as tab:
            await ready(tab)
            size = await tab.picture(into / f"status-{name}.png")
            assert size < MOST_BYTES, name
            print(f"status-{name}.png: {size} bytes")

    def shows(state: str, least: int) -> Callable[[Page], Awaitable[Any]]:
        return lambda tab: tab.until(f"{states(state)} >= {least}")

    talk: list[dict[str, str]] = [{"role": "system", "content": "You are brief. " * 30}]
    for word in ("rivers", "clocks", "salt", "bridges"):
        talk.append({"role": "user", "content": f"Tell me about {word}."})
        answer = await asyncio.to_thread(server.request, "POST", "/v1/chat/completions", {"messages": talk, "max_tokens": 60})
        talk.append({"role": "assistant", "content": answer.body["choices"][0]["message"]["content"]})
        await asyncio.sleep(2)
        with busy(server, len(talk) // 2):
            await asyncio.sleep(len(talk))
    with busy(server, SLOTS - 1):
        await asyncio.sleep(20)
        await take("busy", DESK, shows("decode", 2))
        await take("phone", PHONE, shows("decode", 2))
    await asyncio.sleep(5)
    await take("idle", DESK, shows("idle", 3))
    os.kill(server.health()["engine_pid"], signal.SIGKILL)
    await take("down", DESK, lambda tab: tab.until(f"{SAYS}.startsWith('The engine ended')"))


if __name__ == "__main__":
    PICTURES.mkdir(exist_ok=True)
    with chromium() as port, contextlib.closing(demo()) as started:
        asyncio.run(pictures(port, started, PICTURES))
    sys.exit(0)
