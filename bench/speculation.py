"""Decoding with drafts against decoding without, in one run: the scheduler over a real engine, no HTTP.

    python -m bench.speculation [--model qwen3-8b | FILE] [--head FILE] [--sessions 1,2,4,8,16] [--acceptance 0,0.3,0.6,0.8,1]
        [--drafts 1,2,3] [--tokens 400] [--ctx 512]

With --acceptance every draft is made by the module at its cost and then replaced: by the token that plain decoding drew, with that
probability, else by another one. Without it the module's own drafts count. Each cell's streams are compared with the plain run's,
token for token; one that differs fails the run. A cell's figure is tokens per second from the first token of all sessions to the end
of the first, over the same of the plain runs before and after it; what the prices decided is printed with it. As in a server that is
at work, the scheduler knows its prices from the batch before: each cell is run on a shorter batch first.
"""

from __future__ import annotations

import argparse
import gc
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from bench import corpus
from bench.no_text import NoText
from bench.prompts import QUESTION
from bench.shapes import SHAPES, RandomWeights
from ds4batch.chat.conversation import Conversation, Message
from ds4batch.chat.dialects.choose import choose, facts_of
from ds4batch.chat.template import template_for
from ds4batch.engine.build import assemble, choose_device, kept, warm_up
from ds4batch.engine.draft.build import head_of, random_head
from ds4batch.engine.draft.drafter import Drafter, Proposal, Tokens
from ds4batch.engine.draft.mtp import MtpDrafter
from ds4batch.engine.draft.mtp_cuda import CudaMtpDrafter
from ds4batch.engine.draft.mtp_head import MtpWeights
from ds4batch.engine.engine import Engine
from ds4batch.engine.models.dense import DenseModel
from ds4batch.engine.pages import PagePool, PageShape
from ds4batch.engine.sampler import Draw
from ds4batch.engine.weights.source import WeightSource, open_weights
from ds4batch.messages import Sampling
from ds4batch.settings import Settings
from ds4batch.tokenizer import load_tokenizer
from scheduler.backend import Answered, Sampled
from scheduler.job import Job, JobState
from scheduler.loop import Scheduler
from scheduler.options import Options

RANDOM = "random"
WARM = 160  # tokens of each answer of the batch before


class Forced:
    """What plain decoding drew, by the prompt, and how often a draft is to be it."""

    def __init__(self, vocab: int) -> None:
        self.vocab = vocab
        self._streams: dict[tuple[int, ...], list[int]] = {}
        self._key = 0  # tokens of a prompt that tell sessions apart
        self.share: float | None = None
        self._random = random.Random(1)

    def drew(self, streams: Sequence[list[int]], prompts: Sequence[Sequence[int]]) -> None:
        """What plain decoding made of these prompts, prompt and answer. Raises ValueError where prompts begin alike."""
        self._key = min(map(len, prompts))
        self._streams = {tuple(stream[: self._key]): stream for stream in streams}
        if len(self._streams) != len(streams):
            raise ValueError("two prompts are alike up to the end of the shortest")

    def values(self, known: Sequence[int], count: int) -> list[int]:
        """Drafts for a session that holds `known`, behind the token that follows; wrong ones for one that nobody told of."""
        stream, at = self._streams.get(tuple(known[: self._key]), []), len(known) + 1
        real = [*stream[at : at + count], *[0] * count][:count]
        return [t if self._random.random() < (self.share or 0.0) else (t + 1) % self.vocab for t in real]


class _Known(Proposal):
    """Names of the device's, whose values the host has chosen."""

    def __init__(self, proposal: Proposal, known: dict[int, list[int]]) -> None:
        super().__init__(proposal.tokens)
        self._known = known

    def values(self, slot: int) -> Sequence[int]:
        return self._known[slot]


class ForcedMtp(MtpDrafter):
    """Drafts in plain torch, then replaced."""

    forced: Forced

    def propose(self, wants: Sequence[tuple[int, int]], tokens: Tokens, count: int) -> Proposal:
        proposal = super().propose(wants, tokens, count)
        if self.forced.share is None:
            return proposal
        return Proposal({slot: self.forced.values(tokens(slot), count) for slot in proposal.tokens})


class ForcedCudaMtp(CudaMtpDrafter):
    """Drafts on the card, then replaced there."""

    forced: Forced

    def propose(self, wants: Sequence[tuple[int, int]], tokens: Tokens, count: int) -> Proposal:
        proposal = super().propose(wants, tokens, count)
        if self.forced.share is None:
            return proposal
        known = {slot: self.forced.values(tokens(slot), count) for slot in proposal.tokens}
        flat = [0] * len(self.drafts)
        for slot, names in proposal.tokens.items():
            at = -1 - names[0] - self.named
            flat[at : at + count] = known[slot]
        self.drafts.copy_(torch.tensor(flat).pin_memory(), non_blocking=True)
        return _Known(proposal, known)


class _Silent:
    """Reads nothing. Implements Output."""

    def push(self, sampled: Sampled) -> None:
        return None

    def finish(self, reason: Answered) -> Answered:
        return reason


class Run(NamedTuple):
    """One run of a batch."""

    rate: float  # tokens per second of all sessions
    streams: list[list[int]]  # prompt and answer
    decisions: str


@dataclass
class Rig:
    """A model, with an engine that drafts and one that does not."""

    model: DenseModel
    slots: int
    ctx: int

    def engine(self, drafter: Drafter | None, drafts: int) -> Engine:
        model, config = self.model, self.model.config
        page = 256 if model.device.type == "cuda" else -(-self.ctx // 128) * 128
        kind = model.dtype if model.device.type == "cuda" else torch.float32
        shape = PageShape(config.layers, config.kv_heads, page, config.head_dim, kind)
        pool = PagePool(shape, self.slots * -(-self.ctx // page), model.device)
        rows = self.slots * (1 + drafts) + 1024
        engine = assemble(model, pool, self.slots, self.ctx, rows, drafter=drafter, drafts=drafts)
        if model.device.type == "cuda":
            warm_up(engine, rows, drafts)
        return engine


def scheduler_over(engine: Engine, drafts: int) -> Scheduler:
    options = Options(mixed_prefill_quantum=512, idle_prefill_quantum=1024, itl_budget=10.0, max_queue=0, drafts=drafts,
                      overlap=engine.model.device.type == "cuda")  # fmt: skip
    return Scheduler(engine, NoText(), time.monotonic, slots=len(engine.sessions), options=options)


def run(scheduler: Scheduler, engine: Engine, prompts: Sequence[Sequence[int]], tokens: int) -> Run:
    """Decode all prompts together, greedily. Leaves the engine empty."""
    jobs = [
        Job(id=i, tokens=list(prompt), text="", max_tokens=tokens, sampling=Draw(Sampling(temperature=0.0), list(prompt), ()),
            stop_tokens=frozenset(), api="completions", arrival=time.monotonic(), output=_Silent())
        for i, prompt in enumerate(prompts)
    ]  # fmt: skip
    for job in jobs:
        scheduler.submit(job)
    while not all(job.generated for job in jobs):
        scheduler.step()
    decided = _decisions(scheduler)
    begun, before = time.perf_counter(), sum(len(job.generated) for job in jobs)
    ended, after = begun, before
    while scheduler.busy:
        scheduler.step()
        if ended == begun and any(job.state is JobState.FINISHED for job in jobs):
            ended, after = time.perf_counter(), sum(len(job.generated) for job in jobs)
    said = " ".join(f"{kind} {n}" for kind, n in (_decisions(scheduler) - decided).items())
    prices = scheduler.stats().pricing
    prices = scheduler.stats().pricing
    for bucket in prices.buckets if prices is not None else ():
        if bucket.plain_seconds and bucket.speculative_seconds:
            said += f"; p {bucket.acceptance:.2f} tokens {bucket.tokens:.2f} plain {bucket.plain_seconds * 1e3:.2f} ms"
            said += f" speculative {bucket.speculative_seconds * 1e3:.2f} ms"
    for slot in range(len(engine.sessions)):
        engine.truncate(slot, 0)
    return Run((after - before) / (ended - begun), [[*job.prompt, *job.generated] for job in jobs], said)


def _decisions(scheduler: Scheduler) -> Counter[str]:
    prices = scheduler.stats().pricing
    return Counter({} if prices is None else {kind.value: n for kind, n in prices.decisions.items()})


def load(name: str, head: str, device: torch.device, ctx: int) -> tuple[DenseModel, MtpWeights]:
    """The model and its module; a shape's are random."""
    source: WeightSource = RandomWeights(SHAPES[name], device) if name in SHAPES else open_weights(name)
    settings = Settings(model=name, mtp=True, mtp_head=head if head != RANDOM else "")
    keep = kept(settings, source.config, device, torch.bfloat16) if name not in SHAPES else frozenset()
    model = DenseModel(source, device, torch.bfloat16, ctx, keep=keep)
    path = None if head == RANDOM or name in SHAPES else head_of(settings, source.config)
    return model, random_head(source.config) if path is None else MtpWeights.load(path, source.config, torch.device("cpu"))


def prompts_of(name: str, vocab: int, count: int, tokens: int) -> list[list[int]]:
    """Prompts of about that many tokens: of random ones for a shape, else a question about some text in the model's chat format."""
    rnd = random.Random(7)
    if name in SHAPES:
        return [[rnd.randrange(vocab) for _ in range(tokens)] for _ in range(count)]
    tokenizer, text = load_tokenizer(name), corpus.prose()
    dialect = choose(tokenizer.architecture, facts_of(tokenizer, template_for(tokenizer)))
    found = []
    for at in (rnd.randrange(len(text) // 2) for _ in range(count)):
        asked = Conversation((Message("user", text[at : at + 4 * tokens] + QUESTION),), ())
        whole = tokenizer.encode(dialect.render(asked).text)
        ids = tokenizer.encode(text[at : at + 4 * tokens])
        over = max(0, len(whole) - tokens)  # cut the text by so many tokens
        kept = tokenizer.decode(ids[: max(1, len(ids) - over)])
        found.append(tokenizer.encode(dialect.render(Conversation((Message("user", kept + QUESTION),), ())).text)[-tokens:])
    return found


def numbers(kind: Callable[[str], float]) -> Callable[[str], list[float]]:
    return lambda text: [kind(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(prog="speculation", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="qwen3-8b", help=f"one of {', '.join(SHAPES)}, or a model file")
    parser.add_argument(
        "--head", default="", help=f"the module's weights, or {RANDOM!r} (default: the model's own; random for a shape)"
    )
    parser.add_argument("--sessions", type=numbers(int), default=[1, 2, 4, 8, 16], help="comma separated")
    parser.add_argument("--acceptance", type=numbers(float), help="shares of right drafts that are forced, comma separated")
    parser.add_argument("--drafts", type=numbers(int), default=[1], help="of a session and cycle, comma separated")
    parser.add_argument("--tokens", type=int, default=400, help="of each answer")
    parser.add_argument("--ctx", type=int, default=512, help="tokens of each prompt: random ones for a shape, else about a text")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    options = parser.parse_args()
    device = choose_device(options.device)
    slots, ctx = max(map(int, options.sessions)), options.ctx + options.tokens + 16
    model, head = load(options.model, options.head, device, ctx)
    forced = Forced(model.config.vocab)
    rig = Rig(model, slots, ctx)
    prompts = prompts_of(options.model, model.config.vocab, slots, options.ctx)
    print(f"{options.model} on {torch.cuda.get_device_name() if device.type == 'cuda' else 'cpu'}, torch {torch.__version__}")
    wrong = 0
    plain_engine = rig.engine(None, 0)
    for drafts in map(int, options.drafts):
        on_card = device.type == "cuda"
        drafter = ForcedCudaMtp(model, head, slots, drafts) if on_card else ForcedMtp(model, head, slots)
        drafter.forced = forced
        forced.share = None
        engine = rig.engine(drafter, drafts)
        gc.collect()
        gc.freeze()  # as in a server: later collections need not walk the models
        for sessions in map(int, options.sessions):
            some, length = prompts[:sessions], options.tokens
            plain = run(scheduler_over(plain_engine, 0), plain_engine, some, length)
            forced.drew(plain.streams, some)
            for share in options.acceptance or [None]:
                forced.share = share
                scheduler = scheduler_over(engine, drafts)
                run(scheduler, engine, some, min(WARM, length))
                found = run(scheduler, engine, some, length)
                again = run(scheduler_over(plain_engine, 0), plain_engine, some, length)
                base = (plain.rate + again.rate) / 2
                plain = again
                differ = sum(a != b for a, b in zip(found.streams, plain.streams, strict=True))
                wrong += differ
                label = "own drafts" if share is None else f"p = {share:.2f}"
                print(f"{drafts} drafts, {sessions:2} sessions, {label}: {found.rate:8.0f} tok/s, plain {base:8.0f}, "
                      f"{found.rate / base:.3f} x; {differ} streams differ; {found.decisions}", flush=True)  # fmt: skip
            forced.share = None
    if wrong:
        raise SystemExit(f"{wrong} streams differ from plain decoding")


if __name__ == "__main__":
    main()
