"""Drafts through the scheduler: the requests of a server that drafts get the tokens and the bits of one that does not."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from bench.draft_lookup import MINIMUM, TASKS, measure
from ds4batch.engine.draft.drafter import Drafter, Proposal, Tokens
from ds4batch.engine.draft.lookup import LookupDrafter
from ds4batch.engine.engine import Engine
from ds4batch.engine.exact import decide
from ds4batch.engine.models.dense import DenseModel
from ds4batch.engine.models.model import Model
from ds4batch.engine.sampler import Draw
from ds4batch.engine.vocabulary import TokenizerVocabulary
from ds4batch.messages import Sampling
from ds4batch.tokenizer import load_tokenizer
from scheduler import Answered, Ended, Job, Options, Pick, Sampled, Scheduler, StepDone, Verdict
from scheduler.backend import Draws
from scheduler.fake import FakeText
from tests.engine.hybrid_models import DENSE, load, save
from tests.engine.models import NATIVE, engine_of, tiny_model
from tests.engine.speculating import Decoded, Forced, assert_same, drafting, plainly, speculatively

pytestmark = pytest.mark.usefixtures("one_thread")

CTX, SLOTS = 256, 4
STOPS = frozenset(range(7))


class Guessing(Forced):
    """Right as often as `share` says, with what a request really gets; for a prompt it does not know it guesses anything."""

    def __init__(self, share: float, seed: int) -> None:
        super().__init__(lambda slot, at: ())
        self.known: list[list[int]] = []
        self._share, self._random = share, random.Random(seed)

    def propose(self, wants: Sequence[tuple[int, int]], tokens: Tokens, count: int) -> Proposal:
        found = {}
        for slot, follow in wants:
            so_far = [*tokens(slot), follow]
            answer = next((one for one in self.known if one[: len(so_far)] == so_far), [])[len(so_far) :]
            right = [t if self._random.random() < self._share else (t + 1) % 190 for t in answer[:count]]
            found[slot] = right[: self._random.randrange(count + 1)] if self._random.random() < 0.3 else right
        return Proposal(found)


class Reading:
    """An output that steers its draws by what it read, as calls of tools do, and may end its turn."""

    def __init__(self, draw: Draw | None = None, end: Callable[[list[int]], Verdict | None] = lambda tokens: None) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[object] = []
        self._draw, self._end = draw, end

    def push(self, sampled: Sampled) -> Verdict | None:
        self.tokens.append(sampled.token)
        self.logprobs.append((sampled.logprob, sampled.top))
        if self._draw is not None:
            self._draw.greedy = sum(self.tokens) % 3 == 0
        return self._end(self.tokens)

    def finish(self, reason: Answered) -> Answered:
        return reason


class Recording(Engine):
    """An engine that keeps every row it draws from, by the tokens before it."""

    rows: dict[tuple[int, ...], torch.Tensor]

    def sample(self, picks: Sequence[Pick]) -> Draws:
        for slot, _, row in picks:
            base = self._position(slot, 0)
            before = (*self.tokens(slot)[:base], *self.drafts(slot)[:row])
            self.rows[before] = self._row(slot, row).clone()
        return super().sample(picks)


@dataclass
class Answers:
    """What a server gave: tokens and log-probabilities by request, how each ended, every row, and drafts right out of those checked."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[object]] = field(default_factory=dict)
    ends: dict[int, tuple[str, int]] = field(default_factory=dict)
    sessions: list[list[int]] = field(default_factory=list)
    rows: dict[tuple[int, ...], torch.Tensor] = field(default_factory=dict)
    checked: int = 0
    right: int = 0


def ends_at(tokens: list[int]) -> Verdict | None:
    """A stop string of two tokens: neither is shown."""
    return Verdict("stop", len(tokens) - 2) if sum(tokens[-2:]) % 17 == 3 and len(tokens) > 2 else None


def ends_with_a_call(tokens: list[int]) -> Verdict | None:
    return Verdict("tool_calls", len(tokens)) if sum(tokens[-3:]) % 23 == 3 and len(tokens) > 2 else None


KINDS: dict[str, tuple[dict[str, object], bool, Callable[[list[int]], Verdict | None]]] = {
    "greedy": ({"temperature": 0.0}, False, lambda tokens: None),
    "seeded": ({"temperature": 0.9, "top_p": 0.9, "seed": 7}, False, lambda tokens: None),
    "penalised": ({"temperature": 0.8, "seed": 3, "repetition_penalty": 1.2, "presence_penalty": 0.4}, False, lambda tokens: None),
    "frequency": ({"temperature": 0.0, "frequency_penalty": 0.6}, False, lambda tokens: None),
    "logprobs": ({"temperature": 0.0, "logprobs": 3}, False, lambda tokens: None),
    "stop string": ({"temperature": 0.9, "seed": 11}, False, ends_at),
    "tools": ({"temperature": 1.0, "seed": 5}, True, ends_with_a_call),
    "greedy tools": ({"temperature": 0.0}, True, ends_with_a_call),
}


def serve(model: Model, drafter: Drafter | None, drafts: int, seed: int, page_tokens: int = 16, overlap: bool = False) -> Answers:
    """Twenty-four requests of all kinds, some of which go on where others ended, over four sessions."""
    plain = engine_of(model, SLOTS, CTX, page_tokens)
    plain.pool.state = model.new_state(SLOTS, drafts)
    engine = Recording(model, plain.pool, SLOTS, CTX, NATIVE, drafter=drafter)
    found = Answers()
    engine.rows = found.rows
    options = Options(
        mixed_prefill_quantum=16, idle_prefill_quantum=32, itl_budget=0.1, max_queue=64, overlap=overlap,
        rewind_min_tokens=8, drafts=drafts if drafter is not None else 0, self_check=True,
    )  # fmt: skip
    ticks = itertools.count()
    scheduler = Scheduler(engine, FakeText(), lambda: next(ticks) * 1e-3, slots=SLOTS, options=options)
    if drafter is not None:
        rnd = random.Random(seed)
        scheduler._speculation._pricing.next_drafts = lambda width, timed=True: rnd.random() < 0.8  # type: ignore[method-assign, union-attr]
    outputs: dict[int, Reading] = {}
    for number, (kind, (sampling, steered, end)) in enumerate(itertools.islice(itertools.cycle(KINDS.items()), 24)):
        prompt = [(number // 3 * 31 + i * 7) % 190 for i in range(20 + 5 * (number % 4))]
        draw = Draw(Sampling(**sampling), prompt, STOPS)  # type: ignore[arg-type]
        outputs[number] = Reading(draw if steered else None, end)
        limit = 1 + (number * 13) % 40 if number % 5 else CTX
        scheduler.submit(
            Job(id=number, tokens=prompt, text="", max_tokens=limit, sampling=draw, stop_tokens=STOPS if number % 4 else frozenset(),
                api=kind, arrival=0.0, output=outputs[number], steered=steered, drafted=number % 4 != 0 or number % 8 == 4)
        )  # fmt: skip
    while scheduler.busy:
        for event in scheduler.step():
            if isinstance(event, Ended):
                found.ends[event.job] = (event.reason, event.completion_tokens)
            elif isinstance(event, StepDone):
                found.checked += event.drafts
                found.right += sum(event.accepted)
    found.tokens = {number: output.tokens for number, output in outputs.items()}
    found.logprobs = {number: output.logprobs for number, output in outputs.items()}
    found.sessions = [list(engine.tokens(slot)) for slot in range(SLOTS)]
    return found


@cache
def hybrid() -> Model:
    with TemporaryDirectory() as directory:
        family, changes = DENSE
        layers = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "vocab_size": 199}
        save(family, changes | layers, Path(directory))
        return load(Path(directory), ctx=CTX)


@cache
def model_of(family: str) -> Model:
    return tiny_model(ctx=CTX) if family == "dense" else hybrid()


@cache
def without(family: str) -> Answers:
    return serve(model_of(family), None, 0, 0)


@pytest.mark.parametrize("family", ["dense", "hybrid"])
@pytest.mark.parametrize(("drafts", "share", "overlap"), [(1, 0.9, False), (3, 0.8, False), (2, 0.2, True), (3, 1.0, True)])
def test_requests_of_every_kind_get_the_same_tokens_and_bits(family: str, drafts: int, share: float, overlap: bool) -> None:
    plain = without(family)
    drafter = Guessing(share, drafts)
    drafter.known = sorted(map(list, plain.rows), key=len, reverse=True)
    found = serve(model_of(family), drafter, drafts, drafts, overlap=overlap)
    assert found.checked > 100
    assert found.right > 0.1 * found.checked
    assert found.tokens == plain.tokens
    assert found.logprobs == plain.logprobs
    assert found.ends == plain.ends
    assert {reason for reason, _ in plain.ends.values()} == {"stop", "length", "tool_calls"}
    for before, logits in plain.rows.items():
        assert torch.equal(found.rows[before], logits), f"after {len(before)} tokens"


def test_a_random_model_that_loops_is_drafted_by_lookup_with_the_same_answers() -> None:
    plain = without("dense")
    found = serve(model_of("dense"), LookupDrafter(SLOTS), 3, 0)
    assert found.checked > 20
    assert (found.tokens, found.logprobs, found.ends) == (plain.tokens, plain.logprobs, plain.ends)


def test_lookup_is_right_more_often_than_not_where_texts_are_repeated_and_edited(demo: DenseModel, demo_path: str) -> None:
    plain = engine_of(demo, 1, 1024, path=decide(demo, 4, 1024))
    engine = Engine(demo, plain.pool, 1, 1024, plain.path, drafter=LookupDrafter(1))
    words = TokenizerVocabulary(load_tokenizer(demo_path))
    figures = measure(engine, words, 3, 48, [TASKS[0], TASKS[2], TASKS[4]])
    assert sum(one.right for one in figures) >= MINIMUM * sum(one.drafts for one in figures)
    assert sum(one.forwards for one in figures) < 0.7 * sum(one.tokens for one in figures)


@pytest.mark.parametrize("drafts", [1, 3])
def test_the_demo_models_logits_are_the_same_with_drafts_and_without(demo: DenseModel, drafts: int) -> None:
    prompts = {slot: [(slot * 7919 + i * 104729) % 49000 for i in range(20 + 7 * slot)] for slot in range(3)}
    draws = {0: Draw(Sampling(temperature=0.0), [0], ()), 1: Draw(Sampling(temperature=0.8, seed=4), [0], ())}
    draws[2] = draws[1]
    path = decide(demo, 3 * (1 + drafts), 256)
    rnd = random.Random(drafts)
    lots = {(slot, at): [rnd.random() < 0.7 for _ in range(drafts)] for slot in prompts for at in range(100)}
    drafter = Forced(lambda slot, at: lots[slot, at])
    engine = drafting(demo, 3, 256, drafter, drafts, page_tokens=16, path=path)
    expected = {slot: plainly(demo, prompts[slot], draws[slot], 18 + drafts, 256, path=path) for slot in prompts}
    drafter.answers = {slot: one.tokens for slot, one in expected.items()}
    found = speculatively(engine, prompts, draws, dict.fromkeys(prompts, 18), drafts, rnd, plain=0.2)
    for slot, one in expected.items():
        assert_same(found[slot], Decoded(one.tokens[: len(prompts[slot]) + 18], one.logits[:18]))
