"""What `/status.json` and each event of `/status/stream` hold. Figures only: no text of any request. Seconds, bytes, tokens."""

from __future__ import annotations

import msgspec


class EngineView(msgspec.Struct, frozen=True, kw_only=True):
    """The engine process."""

    state: str  # starting, ok, restarting, down, stopping
    restarts: int
    last_error: str | None
    device: str | None
    dtype: str | None
    exact_path: str | None


class SlotView(msgspec.Struct, frozen=True, kw_only=True):
    """One slot. The members after `own_pages` are those of the request in it, None while there is none."""

    id: int
    state: str  # empty, idle, stale, prefill, restore, decode, parked
    tokens: int
    idle_seconds: float | None  # None while a request is in it, and when it never had one
    prefill_done: int
    prefill_total: int
    pages: int
    own_pages: int
    tier: str | None
    prompt_tokens: int | None
    cached_tokens: int | None
    generated: int | None
    limit: int | None  # tokens it may generate
    tokens_per_second: float | None
    request_seconds: float | None  # since its arrival


class QueueView(msgspec.Struct, frozen=True, kw_only=True):
    """The requests that have a slot and those that have none."""

    running: int
    waiting: int
    limit: int
    oldest_seconds: float | None  # the longest that one of the waiting ones has been waiting


class SeriesView(msgspec.Struct, frozen=True, kw_only=True):
    """The last minutes, oldest first, one value for each `seconds`; None where there was nothing to measure."""

    seconds: float
    generated_per_second: list[float]
    prompt_per_second: list[float]
    ttft_p50: list[float | None]
    itl_p50: list[float | None]


class RecentView(msgspec.Struct, frozen=True, kw_only=True):
    """The same over a few seconds for the rates, and over the whole window for the medians."""

    generated_per_second: float
    prompt_per_second: float
    ttft_p50: float | None
    itl_p50: float | None


class TierView(msgspec.Struct, frozen=True, kw_only=True):
    """The finished requests that one tier of the reuse ladder served."""

    tier: str
    requests: int
    prompt_tokens: int
    cached_tokens: int


class PoolView(msgspec.Struct, frozen=True, kw_only=True):
    """The KV pool, in pages."""

    page_bytes: int
    pages: int
    used: int
    unshared: int  # that would be used if sessions shared nothing
    parked: int  # in host memory


class MemoryView(msgspec.Struct, frozen=True, kw_only=True):
    """Memory."""

    planned: dict[str, int]  # by kind, as planned at the start; empty before it
    device: int  # in use on the device, 0 where unknown
    kv_usage: float  # 0..1
    pool: PoolView | None


class WidthView(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of drafting for `low` to `high` sessions at once."""

    low: int
    high: int
    acceptance: float
    tokens: float
    drafting: bool


class DraftView(msgspec.Struct, frozen=True, kw_only=True):
    """Speculation. The counts begin with the server, the decisions with the engine."""

    drafter: str
    most: int  # tokens that are guessed at a time
    checked: int
    accepted: int
    decisions: dict[str, int]
    widths: list[WidthView]


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The server at one instant."""

    name: str
    version: str
    model: str
    ctx: int
    uptime_seconds: float
    engine: EngineView
    slots: list[SlotView]
    queue: QueueView
    recent: RecentView
    series: SeriesView
    reuse: list[TierView]
    memory: MemoryView
    drafts: DraftView | None  # None where nothing is drafted
