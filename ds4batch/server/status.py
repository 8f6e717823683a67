"""The status page: `GET /` is the page, `GET /status.json` one snapshot, `GET /status/stream` one a second while somebody reads.

A snapshot is made from what has already passed the link; the engine is never asked. With many listeners it is made once.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
from importlib import resources

import msgspec
from aiohttp import web

from ds4batch import __version__
from ds4batch.messages import SlotStat
from ds4batch.server import sse
from ds4batch.server.engine_link import EngineState
from ds4batch.server.errors import Unavailable
from ds4batch.server.inflight import Job
from ds4batch.server.service import OWNER, Exchange, Service
from ds4batch.server.status_feed import BUSY, Feed, attach
from ds4batch.server.status_shapes import (
    DraftView,
    EngineView,
    MemoryView,
    PoolView,
    QueueView,
    RecentView,
    SeriesView,
    SlotView,
    Snapshot,
    WidthView,
)
from ds4batch.server.status_window import SECONDS, Cell, median
from ds4batch.server.watch import Gone

MAX_LISTENERS = 16
PERIOD_SECONDS = 1.0
_FRESH_SECONDS = 0.5
"""A snapshot this young serves another listener."""
_SAFE = {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer", "Cache-Control": "no-store"}


class Status:
    """The page's three handlers. Create it before the link runs, so that it sees everything."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._feed = Feed(service.settings.batched_session)
        attach(service.link, self._feed)
        self._page, self._policy = load_page()
        self._encoded = b""
        self._encoded_at = float("-inf")
        self.listeners = 0

    def page(self, exchange: Exchange) -> web.Response:
        """GET /."""
        headers = {**exchange.headers, **_SAFE, "Content-Security-Policy": self._policy}
        return web.Response(body=self._page, headers={**headers, "Content-Type": "text/html; charset=utf-8"})

    def json(self, exchange: Exchange) -> web.Response:
        """GET /status.json."""
        headers = {**exchange.headers, **_SAFE, "Content-Type": "application/json"}
        return web.Response(body=self.encoded() + b"\n", headers=headers)

    async def stream(self, exchange: Exchange) -> web.StreamResponse:
        """GET /status/stream. Ends when the client leaves or loses its key and when the server stops.

        Raises Unavailable for one listener too many.
        """
        if self.listeners >= MAX_LISTENERS:
            raise Unavailable(
                f"the status stream has {MAX_LISTENERS} listeners, which is all it takes; GET /status.json works", 10
            )
        gone = asyncio.Event()

        def on_gone(why: Gone) -> None:
            gone.set()

        self.listeners += 1
        watched = self._service.watch.add(exchange.request, on_gone)
        try:
            stream = sse.SseStream(exchange.request, {**exchange.headers, **_SAFE})
            while True:
                await stream.write(sse.data(self.encoded()))
                keys = self._service.keys
                lost = keys is not None and not keys.holds(exchange.key)
                if gone.is_set() or lost or self._service.link.status.state is EngineState.STOPPING:
                    break
                try:
                    async with asyncio.timeout(PERIOD_SECONDS):
                        await gone.wait()
                    break
                except TimeoutError:
                    continue
            if not gone.is_set():
                await stream.end()
            return stream.response
        finally:
            self.listeners -= 1
            self._service.watch.release(watched)

    def encoded(self) -> bytes:
        """A snapshot as JSON."""
        now = self._feed.clock()
        if now - self._encoded_at >= _FRESH_SECONDS:
            self._encoded, self._encoded_at = msgspec.json.encode(self.snapshot(now)), now
        return self._encoded

    def snapshot(self, now: float) -> Snapshot:
        """The server as it stands."""
        service, feed = self._service, self._feed
        return Snapshot(
            name=OWNER,
            version=__version__,
            model=service.model.id,
            ctx=service.settings.ctx,
            uptime_seconds=round(now - service.started_at, 1),
            engine=self._engine(),
            slots=[self._slot(i, slot, now) for i, slot in enumerate(feed.last.slots)],
            queue=self._queue(now),
            recent=self._recent(now),
            series=_series(feed.window.whole(now)),
            reuse=sorted(feed.tiers.values(), key=lambda tier: (-tier.cached_tokens, tier.tier)),
            memory=self._memory(),
            drafts=self._drafts(),
        )

    def _engine(self) -> EngineView:
        status = self._service.link.status
        ready = status.ready
        return EngineView(
            state=status.state.value,
            restarts=status.restarts,
            last_error=status.last_error,
            device=ready.device if ready else None,
            dtype=ready.dtype if ready else None,
            exact_path=ready.exact_path if ready else None,
        )

    def _slot(self, id: int, slot: SlotStat, now: float) -> SlotView:
        feed = self._feed
        job = feed.placed.get(id)
        trail = job.trail if job is not None else None
        routed = trail.routed if trail is not None else None
        used_at = feed.used_at.get(id)
        return SlotView(
            id=id,
            state=slot.state,
            tokens=slot.live_tokens,
            idle_seconds=round(now - used_at, 1) if used_at is not None and slot.state not in BUSY else None,
            prefill_done=slot.prefill_done,
            prefill_total=slot.prefill_total,
            pages=slot.pages,
            own_pages=slot.own_pages,
            tier=routed.tier if routed is not None else None,
            prompt_tokens=job.prompt_tokens if job is not None else None,
            cached_tokens=routed.cached_tokens if routed is not None else None,
            generated=trail.generated if trail is not None else None,
            limit=min(job.max_tokens, max(1, self._service.settings.ctx - job.prompt_tokens)) if job is not None else None,
            tokens_per_second=_speed(job, now) if job is not None else None,
            request_seconds=round(now - trail.arrival, 1) if trail is not None else None,
        )

    def _queue(self, now: float) -> QueueView:
        feed = self._feed
        oldest = min((job.trail.arrival for job in feed.waiting.values()), default=None)
        return QueueView(
            running=feed.last.running,
            waiting=feed.last.waiting,
            limit=self._service.settings.queue_limit,
            oldest_seconds=None if oldest is None else round(now - oldest, 1),
        )

    def _recent(self, now: float) -> RecentView:
        cells, seconds = self._feed.window.recent(now)
        every = self._feed.window.all(now)
        whole = Cell()
        for cell in every:
            whole.ttft.update(cell.ttft)
            whole.itl.update(cell.itl)
        return RecentView(
            generated_per_second=round(sum(cell.generated for cell in cells) / seconds, 1),
            prompt_per_second=round(sum(cell.prompt for cell in cells) / seconds, 1),
            ttft_p50=median(whole.ttft),
            itl_p50=median(whole.itl),
        )

    def _memory(self) -> MemoryView:
        last, ready = self._feed.last, self._service.link.status.ready
        pool = last.pool
        return MemoryView(
            planned=ready.memory if ready is not None else {},
            device=last.device_memory,
            kv_usage=round(last.kv_usage, 4),
            pool=None
            if pool is None
            else PoolView(
                page_bytes=pool.page_bytes, pages=pool.pages, used=pool.used, unshared=pool.unshared, parked=pool.parked
            ),
        )

    def _drafts(self) -> DraftView | None:
        settings, feed, told = self._service.settings, self._feed, self._feed.last.drafts
        if not settings.drafts:
            return None
        return DraftView(
            drafter=settings.drafter,
            most=settings.drafts,
            checked=feed.checked,
            accepted=feed.accepted,
            decisions=told.decisions if told is not None else {},
            widths=[
                WidthView(
                    low=one.low,
                    high=one.high,
                    acceptance=round(one.acceptance, 4),
                    tokens=round(one.tokens, 3),
                    drafting=one.drafting,
                )
                for one in (told.prices if told is not None else ())
            ],
        )


def load_page() -> tuple[bytes, str]:
    """The page and the Content-Security-Policy that lets it run its own style and script and nothing else."""
    page = resources.files("ds4batch.server").joinpath("static", "status.html").read_text(encoding="utf-8")
    style, script = (_digests(tag, page) for tag in ("style", "script"))
    policy = (
        f"default-src 'none'; style-src {style}; script-src {script}; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return page.encode(), policy


def _digests(tag: str, page: str) -> str:
    found = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.S)
    return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in found)


def _series(cells: list[Cell]) -> SeriesView:
    return SeriesView(
        seconds=SECONDS,
        generated_per_second=[round(cell.generated / SECONDS, 1) for cell in cells],
        prompt_per_second=[round(cell.prompt / SECONDS, 1) for cell in cells],
        ttft_p50=[median(cell.ttft) for cell in cells],
        itl_p50=[median(cell.itl) for cell in cells],
    )


def _speed(job: Job, now: float) -> float | None:
    """Tokens a second since the first one."""
    first = job.trail.first_token_at
    if first is None or job.trail.generated < 2 or now <= first:
        return None
    return round((job.trail.generated - 1) / (now - first), 1)
