"""Measures a server's prices over HTTP, as its users meet them, and writes the table that the simulation reads.

    python -m bench.simulation.measure -m MODEL --slots 16 --ctx 2048 --out FILE [-- further options of ds4batch serve]

Starts a server and asks it, one kind of load after the other: answers side by side at several widths (a step of so many rows), the same
behind long prompts (what a held token adds), a prompt that is held already (the way to the scheduler and back), and new prompts alone (what
prompt tokens add). All prices but the last are read off. Those of prompt tokens are found by trial: the simulation is given the same
prompts, and prices are corrected until its waits for the first token are the measured ones, since it is the scheduler that cuts a prompt.

Client and server share the machine, as in the load that the table is for: what the client takes of it is in the prices.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median

from bench import corpus
from bench.http_stream import Call, ChatClient, Outcome, Result, ServerUnusable
from bench.prompts import PromptBook
from bench.simulation.costs import StepCosts, save_costs
from bench.simulation.run import Plan, simulate
from bench.simulation.traffic import Ask, Session, Traffic
from bench.with_server import serving
from ds4batch.settings import Settings

WIDTHS = (1, 2, 4, 8, 16)
SHORT, LONG = 64, 1200  # tokens of prompts before the answers
ANSWER = 48
PROMPTS = (64, 128, 256, 512)
DEEP = 1600  # the prompt that tells what positions cost
REPEATS = 5
TIMEOUT = 600.0
_ROUNDS = 12
_LEAST = 1e-9


@dataclass(frozen=True)
class Seen:
    """What was measured. Seconds."""

    steps: dict[int, float]  # by decode rows, behind prompts of SHORT tokens
    long_step: float  # of `long_rows` rows behind prompts of `long_tokens`
    long_rows: int
    long_tokens: int
    again: float  # to the first token of a prompt of SHORT tokens that is held
    first: dict[int, float]  # to the first token, by tokens of a prompt


class Probe:
    """Asks a server that nobody else asks. Raises ServerUnusable when an answer fails."""

    def __init__(self, client: ChatClient, book: PromptBook) -> None:
        """`book` is calibrated."""
        self._client = client
        self._book = book
        self._asked = 0

    async def measure(self, slots: int, ctx: int) -> Seen:
        """Every kind of load that fits."""
        await self._step(2, SHORT)  # the first steps of a server are slow
        steps = {rows: await self._step(rows, SHORT) for rows in WIDTHS if rows <= slots}
        rows = min(4, slots)
        long = min(LONG, ctx - 2 * ANSWER)
        long_step = await self._step(rows, long)
        first = {tokens: await self._first(tokens) for tokens in (*PROMPTS, DEEP) if tokens + ANSWER < ctx}
        return Seen(steps, long_step, rows, long, await self._again(), first)

    async def _step(self, rows: int, tokens: int) -> float:
        """The mean time between two tokens while all of `rows` answers are being drawn."""
        results = await asyncio.gather(*(self._ask(self._new(), tokens, ANSWER) for _ in range(rows)))
        start, end = max(one.token_times[0] for one in results), min(one.token_times[-1] for one in results)
        gaps = [b - a for one in results for a, b in one.gaps if a >= start and b <= end]
        if not gaps:
            raise ServerUnusable(f"{rows} answers of {ANSWER} tokens were never drawn side by side")
        return fmean(gaps)

    async def _first(self, tokens: int) -> float:
        return median([(await self._ask(self._new(), tokens, 2)).ttft for _ in range(REPEATS)])

    async def _again(self) -> float:
        index = self._new()
        await self._ask(index, SHORT, 2)
        return median([(await self._ask(index, SHORT, 2)).ttft for _ in range(REPEATS)])

    def _new(self) -> int:
        self._asked += 1
        return self._asked

    async def _ask(self, index: int, tokens: int, answer: int) -> Result:
        result = await self._client.stream(Call(index=index, messages=self._book.single(index, tokens), max_tokens=answer))
        if result.outcome is not Outcome.COMPLETED:
            raise ServerUnusable(f"a request of {tokens} tokens failed: {result.reason}: {result.detail}")
        return result


def fitted(seen: Seen, costs: StepCosts) -> StepCosts:
    """The table in which the simulation meets what was seen. `costs` has all that is no price."""
    held = max(0.0, seen.long_step - seen.steps[seen.long_rows]) / (seen.long_rows * (seen.long_tokens - SHORT))
    rising = _rising({rows: step - held * rows * (SHORT + ANSWER / 2) for rows, step in seen.steps.items()})
    decode = tuple(sorted(rising.items()))
    costs = replace(costs, decode=decode, held=held, request=0.0, reach=0.0)
    request = max(0.0, seen.again - costs.seconds(1, SHORT, 0, 0.0))
    alone = seen.steps[1]
    guess = {tokens: max(_LEAST, seconds - request - alone) for tokens, seconds in seen.first.items() if tokens != DEEP}
    costs = replace(costs, request=request, chunk=_chunk(guess), reach=0.0)
    for _ in range(_ROUNDS):
        for tokens in guess:
            guess[tokens] *= _ratio(seen.first[tokens] - request - alone, _wait(costs, tokens) - request - alone)
        costs = replace(costs, chunk=_chunk(guess))
        if DEEP in seen.first:
            missing = seen.first[DEEP] - _wait(costs, DEEP)
            costs = replace(costs, reach=max(0.0, costs.reach + missing / (DEEP * DEEP / 2)))
    return costs


def _ratio(wanted: float, got: float) -> float:
    return max(wanted, _LEAST) / max(got, _LEAST)


def _rising(table: dict[int, float]) -> dict[int, float]:
    """More rows cost no less: what noise says otherwise is levelled."""
    least = 0.0
    out = {}
    for rows in sorted(table):
        least = out[rows] = max(least, table[rows])
    return out


def _chunk(prices: dict[int, float]) -> tuple[tuple[float, float], ...]:
    return ((0, 0.0), *sorted((float(tokens), seconds) for tokens, seconds in _rising(prices).items()))


def _wait(costs: StepCosts, tokens: int) -> float:
    """To the first token of a prompt alone, by a scheduler that has learned its prices from others before it."""
    asks = tuple(Ask(thread, tokens, 2, 0.1, (thread - 1,) if thread else ()) for thread in range(REPEATS))
    plan = Plan(costs=costs, traffic=Traffic(), slots=4, requests=len(asks), clients=1)
    trail = simulate(plan, [Session(0, 0, 0, 0, asks)])
    return median([one.first_token - one.request.arrival for one in trail.done])


def shape(name: str, source: str) -> StepCosts:
    """A CPU's options, from the server's own settings, with no prices yet."""
    settings = Settings().resolved("cpu")
    return StepCosts(
        name=name,
        source=source,
        decode=((1, 0.0),),
        held=0.0,
        chunk=((0, 0.0),),
        reach=0.0,
        request=0.0,
        chains=False,
        surveyed=False,
        mixed_prefill_quantum=settings.mixed_prefill_quantum,
        idle_prefill_quantum=settings.idle_prefill_quantum,
        itl_budget=settings.itl_budget_ms / 1e3,
        page_tokens=256,
        slo_ttft=10.0,
        slo_tpot=0.25,
    )


async def measure(url: str, slots: int, ctx: int) -> Seen:
    """Ask the server at `url`. Raises ServerUnusable."""
    client = ChatClient(url, model="", temperature=0.0, ignore_eos=True, no_think=False, timeout=TIMEOUT)
    async with client:
        client.model = await client.first_model()
        book = await PromptBook(corpus.prose(), 0, secrets.token_hex(6), SHORT).calibrated(client, LONG)
        return await Probe(client, book).measure(slots, ctx)


def _server(options: argparse.Namespace) -> AbstractContextManager[str]:
    if options.base_url:
        return nullcontext(options.base_url)
    return serving(options.model, str(options.slots), str(options.ctx), options.serve)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, fit, write."""
    parser = argparse.ArgumentParser(prog="measure", description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("-m", "--model", default="", help="GGUF file or model directory")
    where.add_argument("--base-url", default="", help="a server that runs already, of that many slots and that context")
    add("--slots", type=int, default=16, help="resident sessions (default: %(default)s)")
    add("--ctx", type=int, default=2048, help="context of each (default: %(default)s)")
    add("--out", type=Path, required=True, metavar="FILE", help="the table, JSON")
    add("serve", nargs="*", help="further options of ds4batch serve, after --")
    options = parser.parse_args(argv)
    try:
        with _server(options) as url:
            seen = asyncio.run(measure(url, options.slots, options.ctx))
    except ServerUnusable as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(seen)
    costs = fitted(
        seen, shape(options.out.stem, f"bench.simulation.measure of {options.model or options.base_url}, {options.slots} slots")
    )
    save_costs(costs, options.out)
    print(costs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
