"""Train a next-n prediction module for the demo model, from nothing but the model: prompts, answers, training, figures.

    python -m scripts.train_mtp_head --out DIR [--minutes 6] [--streams FILE]

Writes DIR/mtp-head.safetensors whenever it is better than before, and DIR/mtp-head.json with it. docs/mtp-head.md is the model card.
Meant for a GPU; --slots 4 --prompts 24 --held 11 --new 24 --batch-tokens 512 with a minute or two runs all of it on a CPU.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import platform
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from ds4batch.chat.dialects.choose import choose, facts_of
from ds4batch.chat.template import template_for
from ds4batch.engine.build import assemble
from ds4batch.engine.draft.mtp_head import MtpWeights
from ds4batch.engine.engine import Engine
from ds4batch.engine.models.dense import DenseModel
from ds4batch.engine.pages import PagePool, PageShape
from ds4batch.engine.rows import SPLIT
from ds4batch.engine.weights.source import WeightSource, open_weights
from ds4batch.tokenizer import load_tokenizer
from scheduler.backend import Work
from scripts.mtp_acceptance import Matched, acceptance, figures, measure, tokens_a_step
from scripts.mtp_prompts import KINDS, Grammar, Prompt
from scripts.mtp_streams import Answers, Limits, generate, streams_of
from scripts.mtp_training import Corpus, Plan, Teacher, train

MODEL = Path(__file__).parents[1] / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
WEIGHTS, FIGURES = "mtp-head.safetensors", "mtp-head.json"
COMPARED = 96  # prompts whose logits are compared first, in one forward: with few rows other kernels would be compiled
GPU_PAGE = 256  # tokens, as the server has them
START = time.monotonic()


def say(text: str) -> None:
    """A line with the seconds since the start."""
    print(f"[{time.monotonic() - START:6.1f} s] {text}", flush=True)


class Sizes(NamedTuple):
    """What differs between a GPU and a CPU."""

    slots: int
    prefill: int  # rows of a forward beside the slots'
    batch_tokens: int


GPU_SIZES, CPU_SIZES = Sizes(2048, 16384, 16384), Sizes(8, 512, 1024)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0 when the module was trained."""
    options = _options(argv)
    device = torch.device(options.device if options.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu")
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    say(f"Python {platform.python_version()}, torch {torch.__version__}, {_card(device)}")
    source = open_weights(str(options.model))
    ctx = options.longest_prompt + options.new + 2
    teacher = Teacher(source, device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    say(f"{source.config.name}: {source.parameters:,} parameters, read")
    answers, generation = _answers(source, teacher, options, ctx)
    corpus = Corpus(answers, teacher, options.batch_tokens, say)
    learnt, held = np.flatnonzero(~answers.held), np.flatnonzero(answers.held)
    progress = _Progress(teacher, corpus, held[::2], options, out)
    some = torch.randint(len(corpus.tokens), (4096,), generator=torch.Generator().manual_seed(0))
    start = teacher.start(corpus.hidden[some.to(device)])
    progress.record |= {"generation": generation, "agreement": round(corpus.agreement, 5)}
    progress(start)
    reserve = 2 * progress.seconds + 3
    plan = Plan(
        START + 60 * options.minutes - reserve, options.rate, options.hard, options.depth, options.seed,
        max(options.pause, 10 * progress.seconds), options.steps,
    )  # fmt: skip
    began = time.monotonic()
    trained, steps = train(start, teacher, corpus, learnt, plan, progress, say)
    progress.record["training"] = {"seconds": round(time.monotonic() - began, 1), "steps": steps, "streams": len(learnt)}
    progress(trained)
    found = measure(MtpWeights.load(out / WEIGHTS, source.config, device), teacher, corpus, held[1::2], options.depth)
    progress.record |= {"held_out": figures(found, corpus), "status": "done", "seconds": round(time.monotonic() - START, 1)}
    progress.write()
    say(json.dumps(progress.record["held_out"], indent=1))
    if device.type == "cuda":
        say(f"most device memory: {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")
    say(f"wrote {out / WEIGHTS} and {out / FIGURES}")
    return 0


class _Progress:
    """Looks at weights on the way: measures, and keeps the best. What chooses them is not what the last figures are of."""

    def __init__(self, teacher: Teacher, corpus: Corpus, which: np.ndarray[Any, np.dtype[np.int64]], options: argparse.Namespace,
                 out: Path) -> None:  # fmt: skip
        self._teacher, self._corpus, self._which, self._depth, self._out = teacher, corpus, which, options.depth, out
        self._model = Path(options.model).name
        self._best = -1.0
        self.seconds = 0.0  # that the last look took
        settings = {name: value for name, value in vars(options).items() if not isinstance(value, Path | None)}
        self.record: dict[str, Any] = {
            "status": "training", "date": datetime.date.today().isoformat(),
            "command": " ".join(["python -m scripts.train_mtp_head", *sys.argv[1:]]), "options": settings,
            "model": self._model, "card": _card(teacher.device), "python": platform.python_version(), "torch": torch.__version__,
            "triton": _triton(),
        }  # fmt: skip

    def __call__(self, weights: MtpWeights) -> None:
        start = time.monotonic()
        found: list[Matched] = measure(weights, self._teacher, self._corpus, self._which, self._depth)
        shares = acceptance(found)
        more = f"{tokens_a_step(found, self._depth):.2f} tokens a step with {self._depth} drafts"
        say(f"held out, those that choose: {', '.join(f'{k} {v}' for k, v in shares.items())}; {more}")
        first = float(shares.get("draft_1", 0.0))
        if first > self._best:
            self._best = first
            about = {"model_file": self._model, "trained": str(self.record["date"]), "draft_1": str(first)}
            weights.save(self._out / WEIGHTS, self._teacher.config, about)
            self.record |= {"chosen_by": shares, "parameters": sum(t.numel() for t in weights.named().values())}
            self.write()
        self.seconds = time.monotonic() - start

    def write(self) -> None:
        """The record, whole or not at all."""
        part = self._out / f"{FIGURES}.part"
        part.write_text(json.dumps(self.record, indent=1) + "\n")
        part.replace(self._out / FIGURES)


def _answers(source: WeightSource, teacher: Teacher, options: argparse.Namespace, ctx: int) -> tuple[Answers, dict[str, Any]]:
    """The streams and how they came: from --streams where that exists, else from the engine."""
    kept: Path | None = options.streams
    if kept is not None and kept.exists():
        answers = Answers.load(kept)
        return answers, _counts(answers, 0.0) | {"from": str(kept)}
    tokenizer = load_tokenizer(str(options.model))
    dialect = choose(tokenizer.architecture, facts_of(tokenizer, template_for(tokenizer)))

    def encode(prompts: Sequence[Prompt]) -> list[list[int]]:
        texts = [dialect.render(prompt.conversation).text for prompt in prompts]
        found = tokenizer.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [tokenizer.with_bos(one.ids) for one in found]

    prompts = Grammar(options.seed, True).prompts(options.held) + Grammar(options.seed, False).prompts(options.prompts)
    say(f"{len(prompts):,} prompts")
    rows = options.slots + options.prefill
    engine = _engine(source, teacher.device, options.slots, ctx, rows)
    _compare(engine, teacher, encode(prompts[: min(COMPARED, options.slots)]), rows)
    streams = streams_of(prompts, encode, options.sampled, options.longest_prompt, options.seed)
    start = time.monotonic()
    limits = Limits(options.new, rows, START + 60 * options.minutes * options.share, options.most_tokens)
    answers = Answers.of(generate(engine, streams, tokenizer.stop_ids, limits, say))
    seconds = time.monotonic() - start
    del engine
    gc.collect()
    if teacher.device.type == "cuda":
        torch.cuda.empty_cache()
    if kept is not None:
        answers.save(kept)
    return answers, _counts(answers, seconds)


def _counts(answers: Answers, seconds: float) -> dict[str, Any]:
    new = answers.lengths - answers.prompt
    return {
        "streams": len(new), "held_out": int(answers.held.sum()), "greedy": int(answers.greedy.sum()), "tokens": int(new.sum()),
        "prompt_tokens": int(answers.prompt.sum()), "seconds": round(seconds, 1),
        "kinds": dict(Counter(KINDS[kind] for kind in answers.kind[~answers.held].tolist())),
    }  # fmt: skip


def _engine(source: WeightSource, device: torch.device, slots: int, ctx: int, rows: int) -> Engine:
    """The server's engine with these slots, weights dequantised."""
    config = source.config
    start = time.monotonic()
    model = DenseModel(source, device, torch.bfloat16, ctx)
    on_card = device.type == "cuda"
    page = GPU_PAGE if on_card else -(-ctx // SPLIT) * SPLIT
    shape = PageShape(config.kv_layers, config.kv_heads, page, config.head_dim, torch.bfloat16 if on_card else torch.float32)
    pool = PagePool(shape, slots * -(-ctx // page), device)
    engine = assemble(model, pool, slots, ctx, rows, graphs=False)
    how = "chained" if engine.path.native and on_card else "one by one"
    say(f"engine: {slots} slots of {ctx} tokens, {pool.pages * shape.bytes / 2**30:.2f} GiB of pages, draws {how}, "
        f"{time.monotonic() - start:.1f} s")  # fmt: skip
    return engine


def _compare(engine: Engine, teacher: Teacher, prompts: Sequence[list[int]], rows: int) -> None:
    """Say how the plain forward's logits differ from the engine's behind as many of the prompts as fit. Leaves the slots empty."""
    while sum(map(len, prompts)) > rows:
        prompts = prompts[:-1]
    engine.launch([Work(slot, prompt, True) for slot, prompt in enumerate(prompts)])
    same, worst = 0, 0.0
    for slot, prompt in enumerate(prompts):
        ours = engine.logits(slot)
        theirs = teacher.logits(teacher.hidden(torch.tensor([prompt], device=teacher.device))[:, -1])[0]
        same += int(ours.argmax() == theirs.argmax())
        worst = max(worst, float((ours - theirs).abs().max()))
        engine.truncate(slot, 0)
    say(
        f"plain forward against the engine: {same} of {len(prompts)} most likely tokens are the same, logits differ by {worst:.3f}"
    )


def _card(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"


def _triton() -> str:
    import triton

    return str(triton.__version__)


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="train_mtp_head", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, default=MODEL, help="a llama GGUF file (default: the demo model)")
    parser.add_argument("--out", type=Path, required=True, help="directory of the results")
    parser.add_argument("--minutes", type=float, default=6.0, help="for everything, from the start on")
    parser.add_argument("--share", type=float, default=0.5, help="of the minutes, when generation ends")
    parser.add_argument("--streams", type=Path, help="keep the answers in this .npz, or take them from it if it is there")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--slots", type=int, default=0, help=f"answers at a time; 0: {GPU_SIZES.slots} on a GPU")
    parser.add_argument("--prefill", type=int, default=0, help="prompt tokens of a forward; 0: as the device takes")
    parser.add_argument("--prompts", type=int, default=60000, help="at most, beside those that are held out")
    parser.add_argument("--held", type=int, default=550, help="held-out prompts; half choose the weights, half are reported")
    parser.add_argument("--new", type=int, default=384, help="most tokens of an answer")
    parser.add_argument("--longest-prompt", type=int, default=380, help="tokens; longer ones are left out")
    parser.add_argument("--most-tokens", type=int, default=16_000_000, help="of all answers; each takes 1.2 KB of the device")
    parser.add_argument("--sampled", type=float, default=0.2, help="share of answers drawn at temperatures 0.7 to 1.0")
    parser.add_argument("--batch-tokens", type=int, default=0, help="places of a training batch; 0: as the device takes")
    parser.add_argument("--rate", type=float, default=1e-3, help="peak learning rate")
    parser.add_argument(
        "--hard", type=float, default=0.5, help="share of the most likely token in the target, beside the softmax"
    )
    parser.add_argument("--depth", type=int, default=3, choices=(1, 2, 3), help="drafts that are trained")
    parser.add_argument("--pause", type=float, default=20.0, help="seconds between two measurements")
    parser.add_argument("--steps", type=int, default=0, help="at most; 0: until the time is up")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    on_card = options.device == "cuda" or (options.device == "auto" and torch.cuda.is_available())
    for name, size in (GPU_SIZES if on_card else CPU_SIZES)._asdict().items():
        setattr(options, name, getattr(options, name) or size)
    options.prefill = max(options.prefill, options.longest_prompt)
    return options


if __name__ == "__main__":
    sys.exit(main())
