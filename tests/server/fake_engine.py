"""An engine process without a model: speaks the engine's protocol and answers as the prompt's script says.

A prompt may hold `<<{...}>>`, a JSON object with the members of Script. Started as `fake_engine.py [options] --fd N`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import pathlib
import signal
import socket
import sys
import time

import msgspec

from ds4batch.chat.events import Content, TurnEvent
from ds4batch.messages import (
    HEADER,
    Bye,
    Cancel,
    Delta,
    Divergence,
    Event,
    Failed,
    Finished,
    FromEngine,
    Ping,
    Pong,
    Progress,
    Ready,
    Report,
    Routed,
    Shutdown,
    SlotStat,
    StartFailed,
    Stats,
    StepSample,
    Submit,
    TokenLogprob,
    decode_to_engine,
    frame,
)
from ds4batch.settings import Settings


class Script(msgspec.Struct, forbid_unknown_fields=True):
    n: int = 4  # tokens to produce
    size: int = 0  # characters a token is padded to
    delay: float = 0.0  # seconds before each token
    burst: int = 1  # tokens in one report
    progress: int = 1  # prefill reports
    pdelay: float = 0.0  # seconds before each of them
    cached: int = 0
    tier: str = "none"
    victim: str = "empty"
    diverges: int = 0  # the token at which the nearest session differs
    finish: str = ""
    fail: int = 0  # HTTP status of a failure
    fail_after: int = -1  # tokens before it
    die: bool = False  # kill this process when the request is routed
    garbage: bool = False  # send bytes that are no message
    freeze: int = -1  # tokens after which nothing more comes
    deaf: bool = False  # not even when it is cancelled
    hang: bool = False  # stop this whole process when the request is routed
    malformed: str = ""  # calls that could not be read, unless the prompt says "again"
    silent: int = 0  # tokens at the end that bring no delta
    drafts: int = 0  # checked, all but one of them right
    echo: bool = False  # the text is the Submit as JSON, without its tokens
    whole_text: str = ""  # one delta with this text


class FakeEngine:
    def __init__(self, writer: asyncio.StreamWriter, settings: Settings) -> None:
        self.writer = writer
        self.settings = settings
        self.free = list(range(settings.batched_session))
        self.waiting: list[Submit] = []
        self.tasks: dict[int, asyncio.Task[None]] = {}
        self.slot_of: dict[int, int] = {}
        self.deaf: set[int] = set()
        self.leaving = asyncio.Event()

    def send(self, message: FromEngine) -> None:
        self.writer.write(frame(message))

    def report(self, *events: Event, steps: tuple[StepSample, ...] = ()) -> None:
        self.send(Report(events=list(events), steps=list(steps), stats=self.stats()))

    def stats(self) -> Stats:
        busy = set(self.slot_of.values())
        slots = [
            SlotStat("decode" if i in busy else "empty", 7 if i in busy else 0, 0, 0)
            for i in range(self.settings.batched_session)
        ]
        return Stats(running=len(self.slot_of), waiting=len(self.waiting), kv_usage=len(busy) / len(slots), slots=slots)

    def take(self, message: object) -> None:
        if isinstance(message, Submit):
            if not self.free and len(self.waiting) >= self.settings.queue_limit:
                self.report(Failed(id=message.id, status=429, message="the queue is full", retry_after=3.0))
                return
            self.waiting.append(message)
            self.report()
            self.route()
        elif isinstance(message, Cancel):
            self.cancel(message.id)
        elif isinstance(message, Ping):
            self.send(Pong())
        elif isinstance(message, Shutdown):
            for id in [*self.tasks, *(submit.id for submit in self.waiting)]:
                self.cancel(id)
            self.leaving.set()

    def cancel(self, id: int) -> None:
        for submit in self.waiting:
            if submit.id == id:
                self.waiting.remove(submit)
                self.report(finished(id, "abort", len(submit.tokens), 0, 0))
                return
        if id in self.tasks and id not in self.deaf:  # soon, not now: a task that never began would not run its end either
            asyncio.get_running_loop().call_soon(self.tasks[id].cancel)

    def route(self) -> None:
        while self.free and self.waiting:
            submit = self.waiting.pop(0)
            self.slot_of[submit.id] = self.free.pop(0)
            self.tasks[submit.id] = asyncio.create_task(self.work(submit))

    async def work(self, submit: Submit) -> None:
        script = read_script(submit.text)
        total = len(submit.tokens)
        done = 0
        try:
            if script.fail and script.fail_after < 0:
                last: Event = Failed(id=submit.id, status=script.fail, message="scripted failure")
                return
            self.report(
                Routed(
                    id=submit.id,
                    slot=self.slot_of[submit.id],
                    tier=script.tier,
                    cached_tokens=script.cached,
                    victim=script.victim,
                    evicted_tokens=0,
                    queue_seconds=0.001,
                    divergence=nearest(script.diverges),
                )
            )
            if script.die:
                await self.writer.drain()
                os.kill(os.getpid(), signal.SIGKILL)
            if script.hang:
                await self.writer.drain()
                await asyncio.sleep(0.05)  # the front has read it by then, or will
                os.kill(os.getpid(), signal.SIGSTOP)
            if script.deaf:
                self.deaf.add(submit.id)
            for i in range(script.progress):
                await asyncio.sleep(script.pdelay)
                part = total * (i + 1) // script.progress
                self.report(Progress(submit.id, part, total), steps=(StepSample(0, part, 0.001, None),))
            if script.garbage:
                self.writer.write(HEADER.pack(3) + b"\xc1\xc1\xc1")
            for text, count, logprobs in pieces(script, submit):
                if 0 <= script.freeze <= done:
                    await asyncio.Event().wait()
                await asyncio.sleep(script.delay)
                if script.fail and done >= script.fail_after:
                    last = Failed(id=submit.id, status=script.fail, message="scripted failure")
                    return
                done += count
                self.report(
                    Delta(id=submit.id, text=text, events=events(submit, text), tokens=count, logprobs=logprobs),
                    steps=(StepSample(len(self.slot_of), 0, 0.002, None),),
                )
                await self.writer.drain()
            reason = script.finish or ("length" if done >= submit.max_tokens else "stop")
            last = finished(submit.id, reason, total, script.cached, done + script.silent)
            last = msgspec.structs.replace(last, drafts=script.drafts, drafts_accepted=max(0, script.drafts - 1))
            if script.malformed and "tool:" not in submit.text:  # what is said of calls that cannot be read
                last = msgspec.structs.replace(last, malformed=script.malformed, rest=[Content("<broken>")])
        except asyncio.CancelledError:
            last = finished(submit.id, "abort", total, script.cached, done + (script.silent if done else 0))
        finally:
            self.free.append(self.slot_of.pop(submit.id))
            del self.tasks[submit.id]
            self.report(last)
            self.route()


def nearest(at: int) -> Divergence | None:
    return Divergence(slot=1, at=at, live=99, held="left", asked="right", held_tokens=list(b"left")) if at else None


def read_script(text: str) -> Script:
    start, end = text.rfind("<<"), text.rfind(">>")
    return msgspec.json.decode(text[start + 2 : end], type=Script) if 0 <= start < end else Script()


def pieces(script: Script, submit: Submit) -> list[tuple[str, int, list[TokenLogprob]]]:
    if script.echo:
        return [(msgspec.json.encode(msgspec.structs.replace(submit, tokens=[])).decode(), 1, [])]
    if script.whole_text:
        return [(script.whole_text, 1, [])]
    out = []
    count = min(script.n, submit.max_tokens)
    for first in range(0, count, script.burst):
        tokens = range(first, min(count, first + script.burst))
        text = "".join(f"w{i} ".ljust(script.size, "x") for i in tokens)
        wanted = submit.sampling.logprobs
        logprobs = (
            []
            if wanted is None
            else [TokenLogprob(97 + i % 26, -0.5, [(97 + j, -0.5 - j) for j in range(wanted)]) for i in tokens]
        )
        out.append((text, len(tokens), logprobs))
    return out


def events(submit: Submit, text: str) -> list[TurnEvent]:
    """All text is content, for those who asked what it is."""
    return [] if submit.reading is None else [Content(text)]


def finished(id: int, reason: str, prompt: int, cached: int, generated: int) -> Finished:
    return Finished(
        id=id,
        reason=reason,
        prompt_tokens=prompt,
        cached_tokens=cached,  # type: ignore[arg-type]
        completion_tokens=generated,
        queue_seconds=0.001,
        prefill_seconds=0.002,
        decode_seconds=0.003,
    )


async def receive(reader: asyncio.StreamReader) -> bytes:
    (length,) = HEADER.unpack(await reader.readexactly(HEADER.size))
    return await reader.readexactly(length)


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--load", type=float, default=0.0)
    parser.add_argument("--start-failed", default="")
    parser.add_argument("--fail-while", default="", help="StartFailed while this file exists")
    parser.add_argument("--ignore-shutdown", action="store_true")
    args = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    reader, writer = await asyncio.open_unix_connection(sock=socket.socket(fileno=args.fd))
    settings = Settings(**msgspec.msgpack.decode(await receive(reader)))
    await asyncio.sleep(args.load)
    broken = args.start_failed or (args.fail_while and pathlib.Path(args.fail_while).exists() and "the file is there")
    if broken:
        writer.write(frame(StartFailed(broken)))
        await writer.drain()
        sys.exit(1)
    engine = FakeEngine(writer, settings)
    engine.send(
        Ready(
            device="fake",
            dtype="bf16",
            parameters=1,
            exact_path="native",
            page_tokens=settings.ctx,
            memory={"weights": 100, "kv_total": 50},
            load_seconds=args.load,
        )
    )
    engine.report()

    async def read() -> None:
        while True:
            message = decode_to_engine(await receive(reader))
            if not (args.ignore_shutdown and isinstance(message, Shutdown)):
                engine.take(message)

    reading = asyncio.create_task(read())
    leaving = asyncio.create_task(engine.leaving.wait())
    await asyncio.wait({reading, leaving}, return_when=asyncio.FIRST_COMPLETED)
    deadline = time.monotonic() + 2
    while engine.tasks and time.monotonic() < deadline:
        await asyncio.sleep(0.005)
    if leaving.done():
        engine.send(Bye())
        await writer.drain()
        await asyncio.sleep(0.02)
    os._exit(0)


if __name__ == "__main__":
    asyncio.run(main())
