"""Whether two API keys share a server fairly: one keeps ten times as many requests under way as the other.

    python -m bench.fairness -m MODEL [--slots 4] [--requests 4] [--times 10] [--seconds 120] [--weight 1] [--same-key]

Starts `ds4batch serve` with a key for each of two clients. Both are closed loops over prompts and answers of mixed length: a request
ends and the next is sent, so both have requests under way, and with more than one slot's worth each mostly requests waiting. A window of
`--seconds` begins when both have had an answer and ends before either stops sending. In it are counted, for each key, completed tokens:
prompt tokens that were evaluated, not reused, at the time of the first token, and generated ones when they arrive. Of the few requests
that the end of the window cuts only the latter are known. The server's own count of the same, `ds4batch_key_computed_tokens_total`, is
read at both ends, and knows all.

Afterwards some of the greedy answers of each key are asked for again, alone, from a new server with one slot, and must be the same to the
byte. `--same-key` gives both clients one key: what they would get first come first served.

Exit status: 0 when the tokens over the weights are within `--limit` of each other, no request failed and every answer was the same;
1 when not; 2 when the server cannot be measured.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from bench import corpus, seeded
from bench.http_stream import Call, ChatClient, Hangup, Outcome, Result, ServerUnusable, now
from bench.prompts import PromptBook
from bench.server_metrics import Reading, scrape
from bench.stats import summarize
from bench.with_server import serving
from ds4batch.server import keys

PROMPTS = (64, 96, 160, 320)  # tokens, about
ANSWERS = (4, 8, 16, 32, 64)
NEVER = 1 << 30
TIMEOUT = 600.0
SCRAPE_SECONDS = 0.5
COMPUTED, WAITING = "ds4batch_key_computed_tokens_total", "ds4batch_key_requests_waiting"


@dataclass
class Sender:
    """One client: a closed loop of `requests` workers."""

    name: str
    requests: int
    weight: float
    results: list[tuple[Call, Result]] = field(default_factory=list)
    answered: asyncio.Event = field(default_factory=asyncio.Event)

    def tokens(self, start: float, end: float) -> tuple[float, float]:
        """Evaluated and generated in a time."""
        evaluated = generated = 0.0
        for _, result in self.results:
            if not result.token_times:
                continue
            if start <= result.token_times[0] < end:
                evaluated += result.prompt_tokens - result.cached_tokens
            a_chunk = (result.output_tokens or len(result.token_times)) / len(result.token_times)
            generated += a_chunk * sum(start <= at < end for at in result.token_times)
        return evaluated, generated


@dataclass
class Window:
    """When it is measured, on the clock `now`."""

    start: float = math.inf
    end: float = math.inf


@dataclass(frozen=True)
class Watched:
    """The server's own view of the window."""

    first: Reading
    last: Reading
    both_waited: float  # share of the readings in which both keys had requests without a slot

    def computed(self, name: str) -> float:
        """Tokens of a key."""
        series = next((one for one in self.last if one.startswith(COMPUTED) and f'key="{name}"' in one), "")
        return self.last.get(series, 0.0) - self.first.get(series, 0.0)


async def load(
    url: str, many: Sender, few: Sender, made: Mapping[str, str], seconds: float, seed: int
) -> tuple[float, float, Watched]:
    """Drive both. The window's begin and end, and what the server says of it."""
    clients = {sender.name: _client(url, made[sender.name]) for sender in (many, few)}
    admin = _client(url, made["admin"])
    async with clients[many.name], clients[few.name], admin:
        for client in clients.values():
            client.model = await client.first_model()
        book = PromptBook(corpus.prose(), seed, f"fairness {seed}", max(PROMPTS))
        book = await book.calibrated(clients[few.name], max(PROMPTS))
        window = Window()
        workers = [
            asyncio.create_task(_worker(sender, worker, clients[sender.name], book, window))
            for sender in (many, few)
            for worker in range(sender.requests)
        ]
        try:
            await asyncio.gather(many.answered.wait(), few.answered.wait())
            window.start, window.end = now(), now() + seconds
            watched = await _watch(admin, (many.name, few.name), window.end)
        finally:
            window.end = min(window.end, now())
            await asyncio.gather(*workers)
    return window.start, window.end, watched


async def _worker(sender: Sender, worker: int, client: ChatClient, book: PromptBook, window: Window) -> None:
    """One request after another until the window ends, which cuts the last. Lengths depend on the seed and the place alone."""
    turn = 0
    while (left := window.end - now()) > 0:
        index = (2 * worker + (sender.name == "few")) * 100_000 + turn
        prompt = PROMPTS[seeded.below(len(PROMPTS), book.seed, "prompt", index)]
        answer = ANSWERS[seeded.below(len(ANSWERS), book.seed, "answer", index)]
        patience = Hangup(NEVER, min(left, TIMEOUT))
        call = Call(index=index, messages=book.single(index, prompt), max_tokens=answer, hangup=patience)
        result = await client.stream(call)
        sender.results.append((call, result))
        sender.answered.set()
        if result.outcome is Outcome.FAILED:
            await asyncio.sleep(0.2)  # do not let a refusal become a storm
        turn += 1


async def _watch(admin: ChatClient, names: tuple[str, str], end: float) -> Watched:
    """Read the server's figures until the window ends."""
    url = f"{admin.root}/metrics"
    first = last = await scrape(admin.session, url)
    waited = readings = 0
    while now() < end:
        await asyncio.sleep(min(SCRAPE_SECONDS, max(0.0, end - now())))
        last = await scrape(admin.session, url)
        readings += 1
        waited += all(any(s.startswith(WAITING) and f'key="{name}"' in s and v > 0 for s, v in last.items()) for name in names)
    return Watched(first, last, waited / max(1, readings))


async def differing(url: str, asked: Sequence[tuple[Call, Result]]) -> list[str]:
    """Ask again, one after another, of a server that does nothing else. What came out otherwise."""
    wrong = []
    async with _client(url, "") as client:
        client.model = await client.first_model()
        for call, before in asked:
            again = await client.stream(replace(call, hangup=None))
            same = (again.text.encode(), again.output_tokens, again.finish_reason) == (
                before.text.encode(), before.output_tokens, before.finish_reason
            )  # fmt: skip
            if again.outcome is not Outcome.COMPLETED or not same:
                wrong.append(f"request {call.index}: {before.text!r} under load, {again.text!r} alone {again.detail}")
    return wrong


def report(many: Sender, few: Sender, start: float, end: float, watched: Watched) -> float:
    """Print what each got; how far apart they are, over their weights."""
    print(f"window of {end - start:.0f} s; in {100 * watched.both_waited:.0f} % of the readings both had requests waiting")
    print(f"{'key':<6} {'under way':>9} {'weight':>6} {'answers':>8} {'evaluated':>10} {'generated':>10} {'completed':>10} "
          f"{'server':>8} {'TTFT p50':>9} {'p95':>8}")  # fmt: skip
    per_weight = []
    for sender in (many, few):
        evaluated, generated = sender.tokens(start, end)
        inside = [r for _, r in sender.results if r.outcome is Outcome.COMPLETED and start <= r.end < end]
        ttft = summarize([result.ttft for result in inside])
        per_weight.append((evaluated + generated) / sender.weight)
        print(f"{sender.name:<6} {sender.requests:>9} {sender.weight:>6g} {len(inside):>8} {evaluated:>10.0f} {generated:>10.0f} "
              f"{evaluated + generated:>10.0f} {watched.computed(sender.name):>8.0f} {ttft.p50:>7.2f} s {ttft.p95:>6.2f} s")  # fmt: skip
    return max(per_weight) / max(1.0, min(per_weight))


def _client(url: str, key: str) -> ChatClient:
    return ChatClient(url, model="", temperature=0.0, ignore_eos=False, no_think=False, timeout=TIMEOUT, api_key=key)


def write_keys(path: Path, weight: float, same: bool) -> dict[str, str]:
    """A file of keys; the key of each client and of who reads the metrics."""
    infos = [keys.KeyInfo("many", "user"), keys.KeyInfo("few", "user", weight=weight), keys.KeyInfo("admin", "admin")]
    made = {info.name: keys.new_key() for info in infos}
    path.touch(0o600)
    path.write_text("".join(keys.Entry(info, keys.digest_of(made[info.name])).line + "\n" for info in infos), encoding="utf-8")
    return made | ({"few": made["many"]} if same else {})


def chosen(sender: Sender, count: int) -> list[tuple[Call, Result]]:
    """Some of its answers, from the whole run."""
    good = [one for one in sender.results if one[1].outcome is Outcome.COMPLETED]
    step = max(1, len(good) // max(1, count))
    return good[::step][:count]


def main(argv: Sequence[str] | None = None) -> int:
    """Serve, load, compare; the exit status."""
    parser = argparse.ArgumentParser(prog="fairness", allow_abbrev=False, description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-m", "--model", required=True, help="GGUF file or model directory")
    parser.add_argument("--slots", type=int, default=4, help="resident sessions (default: %(default)s)")
    parser.add_argument("--ctx", type=int, default=2048, help="context of each (default: %(default)s)")
    parser.add_argument("--requests", type=int, default=4, help="requests the one keeps under way (default: %(default)s)")
    parser.add_argument("--times", type=int, default=10, help="so many times as many the other does (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=120.0, help="length of the window (default: %(default)s)")
    parser.add_argument("--weight", type=float, default=1.0, help="of the one with fewer requests (default: %(default)s)")
    parser.add_argument("--same-key", action="store_true", help="both use one key")
    parser.add_argument("--limit", type=float, default=1.2, help="largest ratio that passes (default: %(default)s)")
    parser.add_argument("--check", type=int, default=8, help="answers of each that are compared (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    many = Sender("many", options.requests * options.times, 1.0)
    few = Sender("few", options.requests, options.weight)
    try:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "keys"
            made = write_keys(path, options.weight, options.same_key)
            queue = str(2 * (many.requests + few.requests))
            extra = ["--api-key-file", str(path), "--max-queue", queue]
            with serving(options.model, str(options.slots), str(options.ctx), extra) as url:
                start, end, watched = asyncio.run(load(url, many, few, made, options.seconds, options.seed))
        apart = report(many, few, start, end, watched)
        asked = [*chosen(many, options.check), *chosen(few, options.check)]
        with serving(options.model, "1", str(options.ctx)) as url:
            wrong = asyncio.run(differing(url, asked))
    except ServerUnusable as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    failed = [result for sender in (many, few) for _, result in sender.results if result.outcome is Outcome.FAILED]
    for result in failed[:3]:
        print(f"failed: {result.reason}: {result.detail}", file=sys.stderr)
    print("\n".join(wrong), end="\n" if wrong else "", file=sys.stderr)
    print(
        f"ratio {apart:.3f} (limit {options.limit:g}), {len(failed)} failed, {len(wrong)} of {len(asked)} answers differ from solo ones"
    )
    return int(apart > options.limit or bool(failed) or bool(wrong) or not asked)


if __name__ == "__main__":
    sys.exit(main())
