"""How often drafts by lookup are right: the demo model, asked to repeat and to edit texts that it is given.

    python -m bench.draft_lookup -m models/SmolLM2-135M-Instruct.Q4_1.gguf --drafts 3

Answers are greedy, one at a time. Every one is drawn with drafts and without, and must be the same.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import NamedTuple

from ds4batch.engine.build import build
from ds4batch.engine.engine import Engine
from ds4batch.engine.sampler import Draw
from ds4batch.engine.vocabulary import TokenizerVocabulary
from ds4batch.messages import Sampling
from ds4batch.settings import Settings
from ds4batch.tokenizer import load_tokenizer
from scheduler.backend import Pick, Work

MINIMUM = 0.5
"""Of the drafts checked in this set, that are right."""

CTX = 1024
CODE = """def mean(values):
    total = 0
    for value in values:
        total += value
    return total / len(values)


def variance(values):
    average = mean(values)
    total = 0
    for value in values:
        total += (value - average) ** 2
    return total / len(values)
"""
PROSE = (
    "The ferry leaves the harbour at seven. It calls at three islands, takes on mail and fresh bread, and comes back before dark. "
    "In winter it runs only on Mondays, when the weather allows it, and nobody is surprised if it does not come at all."
)
LIST = "\n".join(f"- host{i}.example.org: port {8000 + i}, user admin, state running" for i in range(8))
TASKS = (
    f"Repeat this text word for word:\n\n{PROSE}",
    f"Repeat this Python code exactly, with no explanation:\n\n```python\n{CODE}```",
    f"Write this Python code again, but rename the function mean to average:\n\n```python\n{CODE}```",
    f"Copy this list and change the state of the last host to stopped:\n\n{LIST}",
    f"Repeat this list:\n\n{LIST}",
)


class Figures(NamedTuple):
    """What came of one task, or of all."""

    tokens: int
    forwards: int
    drafts: int
    right: int
    seconds: float
    plain_seconds: float

    @property
    def acceptance(self) -> float:
        """Drafts that were right, of those checked."""
        return self.right / self.drafts if self.drafts else 0.0


def total(figures: Sequence[Figures]) -> Figures:
    """Of all tasks together."""
    return Figures(
        sum(one.tokens for one in figures),
        sum(one.forwards for one in figures),
        sum(one.drafts for one in figures),
        sum(one.right for one in figures),
        sum(one.seconds for one in figures),
        sum(one.plain_seconds for one in figures),
    )


def prompt_of(task: str) -> str:
    """A turn of the demo model's template."""
    return f"<|im_start|>user\n{task}<|im_end|>\n<|im_start|>assistant\n"


def answer(
    engine: Engine, slot: int, prompt: list[int], most: int, stops: frozenset[int], drafts: int
) -> tuple[list[int], Figures]:
    """A greedy answer of at most `most` tokens in an empty slot, with so many drafts at a time."""
    greedy = Draw(Sampling(temperature=0.0), prompt, stops)
    engine.launch([Work(slot, prompt, True)])
    (first,) = engine.sample([Pick(slot, greedy)]).wait()
    tokens, forwards, checked, right = [first.token], 0, 0, 0
    started = time.perf_counter()
    while len(tokens) < most and tokens[-1] not in stops:
        made = min(engine.propose([(slot, tokens[-1])], drafts)[0], most - len(tokens) - 1) if drafts else 0
        engine.launch([Work(slot, [tokens[-1]], True, made)])
        drawn = engine.sample([Pick(slot, greedy, row) for row in range(1 + made)]).wait()
        given, accepted = engine.drafts(slot), 0
        while accepted < made and drawn[accepted].token == given[accepted] and given[accepted] not in stops:
            accepted += 1
        tokens += [one.token for one in drawn[: accepted + 1]]
        if made:
            engine.accept(slot, accepted)
            engine.truncate(slot, len(engine.tokens(slot)))
        forwards, checked, right = forwards + 1, checked + made, right + accepted
    return tokens, Figures(len(tokens), forwards, checked, right, time.perf_counter() - started, 0.0)


def measure(engine: Engine, words: TokenizerVocabulary, drafts: int, most: int, tasks: Sequence[str] = TASKS) -> list[Figures]:
    """Answer each task in slot 0, with drafts and without. Raises RuntimeError when drafts change an answer."""
    found = []
    for task in tasks:
        prompt = words.tokenise(prompt_of(task))
        engine.truncate(0, 0)
        plain, alone = answer(engine, 0, prompt, most, words.stop_ids, 0)
        engine.truncate(0, 0)
        tokens, figures = answer(engine, 0, prompt, most, words.stop_ids, drafts)
        if tokens != plain:
            raise RuntimeError(f"drafts changed an answer: {task.splitlines()[0]}")
        found.append(figures._replace(plain_seconds=alone.seconds))
    return found


def main() -> None:
    """Print a line a task and one for all."""
    parser = argparse.ArgumentParser(prog="draft_lookup", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-m", "--model", required=True, metavar="FILE")
    parser.add_argument("--drafts", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=160, help="of each answer, at most")
    parser.add_argument("--threads", type=int, default=0)
    options = parser.parse_args()
    settings = Settings(
        model=options.model, ctx=CTX, device="cpu", draft="lookup", mtp_draft=options.drafts, threads=options.threads
    )
    words = TokenizerVocabulary(load_tokenizer(options.model))
    figures = measure(build(settings).engine, words, options.drafts, options.tokens)
    for task, one in [*zip(TASKS, figures, strict=True), ("all", total(figures))]:
        print(
            f"{task.splitlines()[0][:60]:60} {one.right:4} of {one.drafts:4} drafts right ({one.acceptance:4.0%}), "
            f"{one.tokens / max(one.forwards, 1):.2f} tokens a forward, {one.plain_seconds / max(one.seconds, 1e-9):.2f} x plain"
        )


if __name__ == "__main__":
    main()
