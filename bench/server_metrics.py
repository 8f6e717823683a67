"""What the server's own Prometheus page says a load did to it.

Owns fetching that page, the difference of two readings, and the few summaries made from it. Names follow vLLM, whose
dashboards other servers copy; a server that exports none of them simply yields less.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from dataclasses import dataclass

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from bench.http_stream import ServerUnusable

Reading = dict[str, float]  # series, as name{label="value"} with sorted labels, to its value

RUNNING, WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
QUEUE = "vllm:request_queue_time_seconds"
DRAFTS, DRAFT_TOKENS, ACCEPTED = (
    "vllm:spec_decode_num_drafts_total",
    "vllm:spec_decode_num_draft_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_total",
)
SETTLE_SECONDS = 5.0  # how long after the load a server may take to notice that its clients are gone
SETTLE_INTERVAL = 0.1


@dataclass(frozen=True)
class HistogramSummary:
    """A server-side histogram over the load, in milliseconds; a percentile is interpolated within its bucket."""

    n: int
    mean: float | None
    p50: float | None
    p90: float | None
    p95: float | None
    p99: float | None


@dataclass(frozen=True)
class Speculation:
    """Draft tokens over the load."""

    drafts: int
    draft_tokens: int
    accepted: int
    rate: float | None  # accepted / draft tokens
    mean_len: float | None  # tokens a verified draft yields, its own next token included: 1 + accepted / drafts


def parse_metrics(text: str) -> Reading:
    """Every sample of a text-format page. Raises ValueError on a page that is none."""
    reading: Reading = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f'{name}="{value}"' for name, value in sorted(sample.labels.items()))
            reading[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return reading


async def scrape(session: aiohttp.ClientSession, url: str) -> Reading:
    """The page at `url` now. Raises ServerUnusable."""
    try:
        async with asyncio.timeout(30), session.get(url) as response:
            if response.status != 200:
                raise ServerUnusable(f"{url} answered {response.status}")
            return parse_metrics(await response.text())
    except TimeoutError:
        raise ServerUnusable(f"{url} did not answer within 30 s") from None
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise ServerUnusable(f"{url}: {error}") from None


async def settled(session: aiohttp.ClientSession, url: str) -> Reading:
    """The page at `url` once nothing runs or waits there, or as it is after SETTLE_SECONDS. Raises ServerUnusable."""
    for _ in range(round(SETTLE_SECONDS / SETTLE_INTERVAL)):
        reading = await scrape(session, url)
        if not total(reading, RUNNING) and not total(reading, WAITING):
            return reading
        await asyncio.sleep(SETTLE_INTERVAL)
    return await scrape(session, url)


def difference(before: Mapping[str, float], after: Mapping[str, float]) -> Reading:
    """The change of every series, 0 for those that stood still. A series that appeared counts from 0."""
    changes = {name: value - before.get(name, 0.0) for name, value in sorted(after.items())}
    return {name: change for name, change in changes.items() if math.isfinite(change)}


def total(reading: Mapping[str, float], name: str) -> float | None:
    """The sum of a metric over its labels; None where the server has no such metric."""
    values = [value for series, value in reading.items() if series == name or series.startswith(name + "{")]
    return sum(values) if values else None


def histogram(delta: Mapping[str, float], name: str) -> HistogramSummary | None:
    """A histogram in seconds, summed over its other labels, from a full difference; None if nothing was observed."""
    count = total(delta, name + "_count")
    if not count:
        return None
    edges: dict[float, float] = {}
    for series, value in delta.items():
        if series.startswith(name + "_bucket{"):
            edge = float(series.split('le="', 1)[1].split('"', 1)[0])
            edges[edge] = edges.get(edge, 0.0) + value
    ordered = sorted(edges.items())

    def at(fraction: float) -> float | None:
        value = _bucket_percentile(ordered, fraction * count)
        return None if value is None else 1e3 * value

    return HistogramSummary(int(count), 1e3 * (total(delta, name + "_sum") or 0.0) / count, at(0.5), at(0.9), at(0.95), at(0.99))


def _bucket_percentile(edges: list[tuple[float, float]], rank: float) -> float | None:
    """The rule of Prometheus's histogram_quantile; None where the rank lies above the last finite edge."""
    low, below = 0.0, 0.0
    for edge, cumulative in edges:
        if cumulative >= rank:
            if edge == float("inf"):
                return None
            return low + (edge - low) * (rank - below) / (cumulative - below) if cumulative > below else edge
        low, below = edge, cumulative
    return None


def speculation(delta: Mapping[str, float]) -> Speculation | None:
    """Drafts made and accepted; None where the server drafted nothing."""
    drafts, tokens, accepted = (int(total(delta, name) or 0) for name in (DRAFTS, DRAFT_TOKENS, ACCEPTED))
    if not drafts:
        return None
    return Speculation(drafts, tokens, accepted, accepted / tokens if tokens else None, 1 + accepted / drafts)
