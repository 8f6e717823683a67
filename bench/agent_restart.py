"""Conversations that outlive their server: one turn each, a stop or a kill, a start on the same directory, one turn more.

Owns the order of that run and its figures. What a conversation evaluates after the start should be what is new in it, and
at most a tail that its checkpoint left out.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench import agent_trace
from bench.agent_accounting import Box, Renderer
from bench.agent_check import check, chosen
from bench.agent_client import AgentClient, Request
from bench.agent_messages import Json
from bench.agent_report import NO_DISK_STORE, UNKNOWN, Figure, check_figures, request_figures
from bench.agent_scenario import Record
from bench.agent_servers import ctx_for, disk_options, has_disk_store, kill, oracle_server, traced_server
from bench.prompts import PromptBook
from bench.server_metrics import Reading, difference

ROOM = 256  # for the chat template and the frame of a turn


@dataclass(frozen=True)
class Life:
    """What one server was asked."""

    records: list[Record]
    before: Reading
    after: Reading


class Conversations:
    """All conversations, through both lives of the server."""

    def __init__(self, options: argparse.Namespace, renderer: Renderer, book: PromptBook) -> None:
        self._options = options
        self._renderer = renderer
        self._box = Box()
        tokens = {0: options.conversation_tokens, 1: options.turn_tokens}
        self._said = [
            [book.slice(round(size * book.characters_per_token), "conversation", i, turn) for turn, size in tokens.items()]
            for i in range(options.conversations)
        ]
        self._messages: list[list[Json]] = [[] for _ in self._said]

    async def live(self, url: str, turn: int, *, killed_after: bool) -> Life:
        """One turn of every conversation, all at once; then, where wanted, the end of the server."""
        async with AgentClient(url, self._options.timeout) as client:
            model = await client.first_model()
            engine = (await client.get("/health")).get("engine_pid") if killed_after else None
            before = await client.metrics()
            records = await asyncio.gather(*(self._turn(client, model, i, turn) for i in range(len(self._said))))
            if isinstance(engine, int):
                kill(engine)
                return Life(records, before, {})
            return Life(records, before, await client.metrics())

    async def _turn(self, client: AgentClient, model: str, i: int, turn: int) -> Record:
        messages = self._messages[i]
        messages.append({"role": "user", "content": f"Part {turn} of {i}. {self._said[i][turn]}"})
        sampling: Json = {"temperature": 0.8, "seed": i} if i % 2 else {"temperature": 0}
        body: Json = {"model": model, "messages": list(messages), "max_tokens": self._options.answer_tokens, **sampling}
        request = Request(f"restart-{i}-{turn}", f"conversation {i}", "turn", body)
        prompt = self._renderer.rendered(body)
        new = self._box.new_tokens(prompt)
        answer = await client.ask(request)
        if not answer.failure:
            stopped = answer.finish_reason == "stop"
            self._box.evaluated(prompt, self._renderer.fed_back(answer.content, stopped=stopped))
            messages.append({"role": "assistant", "content": answer.content})
        return Record(request, answer, prompt.tokens, new)


def run(options: argparse.Namespace, renderer: Renderer, book: PromptBook) -> list[Figure]:
    """Both lives and their figures."""
    conversations = Conversations(options, renderer, book)
    ctx = options.ctx or ctx_for(options.conversation_tokens + options.turn_tokens + 2 * options.answer_tokens + ROOM)
    slots = max(options.slots)
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "kv"
        extra = [*disk_options(directory), *options.serve]
        lives = []
        for turn in range(2):
            last = turn == 1
            with traced_server(options.model, slots, ctx, extra, Path(folder) / f"trace-{turn}.jsonl") as url:
                lives.append(asyncio.run(conversations.live(url, turn, killed_after=options.kill and not last)))
        disk = plain_read_rate(directory)
    figures = restart_figures(lives[0].records, lives[1].records, options.tail_tokens)
    figures += disk_figures(difference(lives[1].before, lives[1].after), disk)
    sample = chosen(lives[1].records, options.check, options.seed)
    if sample:
        with oracle_server(options.model, ctx, options.serve) as url:
            figures += check_figures(asyncio.run(check(url, options.timeout, lives[1].records, sample)))
    return figures


def restart_figures(first: Sequence[Record], second: Sequence[Record], tail: int) -> list[Figure]:
    """What was evaluated again after the start. `tail` is what a checkpoint may leave out, tokens."""
    going = [record for record in second if not record.answer.failure]
    warm = sum(record.answer.cached_tokens > 0 for record in going)
    evaluated = [record.answer.prompt_tokens - record.answer.cached_tokens for record in going]
    again = [tokens - record.new_tokens for tokens, record in zip(evaluated, going, strict=True)]
    within = sum(tokens <= tail for tokens in again)
    return [
        *request_figures([*first, *second]),
        Figure("conversations found again", warm, f"{warm} of {len(going)}", warm == len(going)),
        Figure("prompt tokens after the start", sum(r.answer.prompt_tokens for r in going),
               f"{sum(r.answer.prompt_tokens for r in going)}, new {sum(r.new_tokens for r in going)}"),
        Figure("prefilled after the start", sum(evaluated), f"{sum(evaluated)}, at most {max(again, default=0)} beyond the new"),
        Figure("within new + tail", within, f"{within} of {len(going)}, tail {tail}", within == len(going)),
    ]  # fmt: skip


def disk_figures(delta: Reading, plain: float | None) -> list[Figure]:
    """How fast checkpoints came from the disk, beside a plain read of the same files."""
    rate = agent_trace.load_rate(delta)
    beside = "" if plain is None else f"; a plain read of all checkpoints, straight afterwards: {plain / 1e6:.0f} MB/s"
    figures = [Figure("loads, bytes a second", rate, (UNKNOWN if rate is None else f"{rate / 1e6:.0f} MB/s") + beside)]
    if not has_disk_store():
        figures.append(NO_DISK_STORE)
    return figures + [Figure(series, value, f"{value:g}") for series, value in agent_trace.notable(delta).items()]


def plain_read_rate(directory: Path) -> float | None:
    """Bytes a second of reading every checkpoint once; None without any. The pages may still be in memory, as they were for the server."""
    files = sorted(directory.glob("*.kv")) if directory.is_dir() else []
    began = time.perf_counter()
    size = sum(len(path.read_bytes()) for path in files)
    seconds = time.perf_counter() - began
    return size / seconds if size else None
