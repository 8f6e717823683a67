"""The flags of the HTTP load benchmark: name, default, meaning, and the check of each value.

Owns the command line. Every message of a refused value names its flag; argparse ends the program with status 2.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

MODES = ("closed", "poisson", "sessions")
GOALS = ("ttft", "tpot", "e2el")
DEFAULT_KEY_VARIABLE = "DS4BATCH_API_KEY"


class Cell(NamedTuple):
    """One concurrency of a sweep, and how many requests it makes."""

    concurrency: int
    requests: int | None  # None: as --requests says


class When(NamedTuple):
    """When the intruder arrives: after so many seconds, or once this share of the requests has ended; one is None."""

    seconds: float | None
    share: float | None


class DisconnectAfter(NamedTuple):
    """When a chosen request hangs up."""

    kind: str  # prefill, tokens, random
    tokens: int = 0


@dataclass(frozen=True)
class Options:
    """A checked command line. A field's name is its flag with underscores; times are seconds."""

    base_url: str
    model: str
    api_key_env: str
    mode: str
    requests: int
    concurrency: int
    request_rate: float
    burstiness: float
    max_concurrency: int
    sessions: int
    turns: int
    turn_tokens: int
    think_time: float
    sweep: tuple[Cell, ...]
    prompt_file: Path | None
    prompt_set: str
    prompt_tokens: int
    shared_prefix: bool
    seed: int
    run_id: str
    max_tokens: int
    temperature: float
    ignore_eos: bool
    no_think: bool
    warmup: int
    timeout: float
    allow_failures: bool
    disconnect_fraction: float
    disconnect_after: DisconnectAfter
    intruder_tokens: int
    intruder_at: When
    goodput: dict[str, float]  # milliseconds
    metrics_url: str
    json: Path | None
    per_request: bool
    plot: Path | None
    label: str

    @property
    def total_requests(self) -> int:
        """Measured requests, the intruder not among them."""
        return self.sessions * self.turns if self.mode == "sessions" else self.requests

    @property
    def longest_text(self) -> int:
        """Tokens of the longest piece of text that any message holds."""
        return max(self.prompt_tokens, self.intruder_tokens, self.turn_tokens if self.mode == "sessions" else 0)


def parse_options(argv: Sequence[str] | None = None) -> Options:
    """The options `argv` spells. Ends the program with a message on the error stream if they make no sense."""
    parser = _parser()
    args = vars(parser.parse_args(argv))
    goals: list[tuple[str, float]] = args.pop("goodput")
    args["goodput"] = dict(goals)
    args["mode"] = args["mode"] or ("poisson" if args["request_rate"] else "closed")
    options = Options(**args)
    _check_together(parser, options, [name for name, _ in goals])
    _check_outputs(parser, options)
    return options


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Shows a default only where there is one to show."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        nothing = action.default is False or action.default in (None, "", (), [])
        return action.help if nothing else super()._get_help_string(action)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bench/serve_concurrency.py",
        formatter_class=_Help,
        allow_abbrev=False,
        description="Load a server that speaks the OpenAI chat API and measure what its users would see. "
        "docs/benchmarking.md defines every figure.",
    )
    _server_flags(parser.add_argument_group("server"))
    _load_flags(parser.add_argument_group("load"))
    _prompt_flags(parser.add_argument_group("prompts and answers"))
    _trouble_flags(parser.add_argument_group("trouble on purpose"))
    _output_flags(parser.add_argument_group("results"))
    return parser


def _server_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--base-url", type=_url, default="http://127.0.0.1:8000", help="where the server listens, with or without /v1"
    )
    group.add_argument("--model", default="", help="model id to ask for; empty takes the first that the server lists")
    group.add_argument(
        "--api-key-env",
        default=DEFAULT_KEY_VARIABLE,
        metavar="VAR",
        help="environment variable that holds the server's API key (default: %(default)s, where it is set); /metrics needs one of "
        "admin scope",
    )
    group.add_argument("--timeout", type=_positive, default=1800.0, metavar="S", help="longest a request may take")
    group.add_argument(
        "--metrics-url",
        type=_optional_url,
        default="",
        metavar="URL",
        help="Prometheus page of the server; the difference over the load goes into the result",
    )


def _load_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--mode",
        choices=MODES,
        default=None,
        help="closed: workers that ask again at once; poisson: arrivals on a schedule; sessions: conversations "
        "that grow. Left out, a --request-rate means poisson and none means closed",
    )
    group.add_argument("--requests", type=_whole(1), default=32, metavar="N", help="requests to measure (not in sessions mode)")
    group.add_argument("--concurrency", type=_whole(1), default=8, metavar="N", help="workers of the closed loop")
    group.add_argument(
        "--request-rate", type=_not_negative, default=0.0, metavar="R", help="arrivals a second; 0 is a closed loop"
    )
    group.add_argument(
        "--burstiness",
        type=_positive,
        default=1.0,
        metavar="B",
        help="shape of the gamma-distributed gaps; 1 is Poisson, below 1 clusters",
    )
    group.add_argument(
        "--max-concurrency",
        type=_whole(0),
        default=0,
        metavar="N",
        help="most requests in flight in the open loop or sessions in a turn; 0 is no limit",
    )
    group.add_argument("--sessions", type=_whole(1), default=8, metavar="N", help="conversations in sessions mode, all at once")
    group.add_argument("--turns", type=_whole(1), default=4, metavar="T", help="turns of each conversation")
    group.add_argument("--turn-tokens", type=_whole(1), default=300, metavar="N", help="what each later turn adds")
    group.add_argument(
        "--think-time", type=_not_negative, default=0.0, metavar="S", help="pause between an answer and the next turn"
    )
    group.add_argument(
        "--sweep",
        type=_sweep,
        default=(),
        metavar="C[:N],...",
        help="run the closed loop at each concurrency C, with N requests (else --requests), and compare with the first",
    )
    group.add_argument("--warmup", type=_whole(0), default=1, metavar="N", help="requests made first and not measured")


def _prompt_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--prompt-tokens", type=_whole(0), default=1024, metavar="N", help="prompt length; 0 is a one-line prompt")
    group.add_argument(
        "--prompt-set",
        choices=("prose", "code"),
        default="prose",
        help="what prompts are cut from: generated prose, or this repository's documents and source",
    )
    group.add_argument("--prompt-file", type=Path, default=None, metavar="FILE", help="cut the prompts from this text instead")
    group.add_argument(
        "--shared-prefix",
        action="store_true",
        help="same text in every prompt and the nonce last, so that it can be reused",
    )
    group.add_argument("--seed", type=_whole(0), default=0, metavar="N", help="fixes offsets, arrivals and who disconnects")
    group.add_argument(
        "--run-id",
        default="",
        metavar="TEXT",
        help="fixes the nonces too; left empty, a fresh one is drawn, so that no prompt was seen by the server before",
    )
    group.add_argument("--max-tokens", type=_whole(1), default=128, metavar="N", help="longest answer")
    group.add_argument("--temperature", type=_not_negative, default=0.0, metavar="T", help="0 is greedy")
    group.add_argument(
        "--ignore-eos", action="store_true", help="every answer has exactly --max-tokens tokens; others are rejected"
    )
    group.add_argument("--no-think", action="store_true", help="ask the chat template not to think")


def _trouble_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--disconnect-fraction", type=_share, default=0.0, metavar="F", help="share of the requests that hang up")
    group.add_argument(
        "--disconnect-after",
        type=_disconnect_after,
        default="prefill",
        metavar="WHEN",
        help="prefill: before the first token; K: after K token chunks; random: each request draws",
    )
    group.add_argument(
        "--intruder-tokens",
        type=_whole(0),
        default=0,
        metavar="N",
        help="one more request with a prompt of N tokens arrives during the load; 0 is none",
    )
    group.add_argument(
        "--intruder-at",
        type=_when,
        default="25%",
        metavar="WHEN",
        help="when it arrives: seconds after the start, or a share of the requests done, as 25%%",
    )


def _output_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--goodput",
        type=_goal,
        nargs="+",
        default=[],
        metavar="NAME:MS",
        help="count requests that meet every goal, of ttft, tpot and e2el, in milliseconds",
    )
    group.add_argument("--json", type=Path, default=None, metavar="FILE", help="write the result here")
    group.add_argument("--per-request", action="store_true", help="put every request into the JSON")
    group.add_argument("--plot", type=Path, default=None, metavar="DIR", help="write PNG plots here (needs matplotlib)")
    group.add_argument("--label", default="", help="a name for the run, kept in the result")
    group.add_argument("--allow-failures", action="store_true", help="end with status 0 although streams were rejected")


def _check_together(parser: argparse.ArgumentParser, options: Options, goals: list[str]) -> None:
    """Refuse flags that contradict each other."""
    refusals = (
        (options.mode == "poisson" and not options.request_rate, "--mode poisson needs a --request-rate above 0"),
        (
            options.mode != "poisson" and options.request_rate > 0,
            f"--request-rate does not go with --mode {options.mode}",
        ),
        (
            options.mode == "closed" and options.max_concurrency > 0,
            "--max-concurrency is for the open loop and sessions; a closed loop has --concurrency",
        ),
        (bool(options.sweep) and options.mode != "closed", f"--sweep does not go with --mode {options.mode}"),
        (len(set(goals)) != len(goals), "--goodput names a goal twice"),
        (
            options.disconnect_fraction > 0 and options.mode == "sessions",
            "--disconnect-fraction does not go with --mode sessions: a session cannot go on from half an answer",
        ),
    )
    for refused, message in refusals:
        if refused:
            parser.error(message)


def _check_outputs(parser: argparse.ArgumentParser, options: Options) -> None:
    """Find out before the load, not after it, that a result could not be written."""
    if options.json is not None and (options.json.is_dir() or not options.json.absolute().parent.is_dir()):
        parser.error(f"--json: {options.json} cannot be written: it is a directory or its directory does not exist")
    if options.prompt_file is not None and not options.prompt_file.is_file():
        parser.error(f"--prompt-file: {options.prompt_file} is no file")
    if options.plot is not None:
        if importlib.util.find_spec("matplotlib") is None:
            parser.error("--plot needs matplotlib: pip install 'ds4batch[bench]'")
        try:
            options.plot.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            parser.error(f"--plot: {error}")


def _refuse(message: str) -> argparse.ArgumentTypeError:
    return argparse.ArgumentTypeError(message)


def _whole(low: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise _refuse(f"{text!r} is not a whole number") from None
        if value < low:
            raise _refuse(f"{value} is below {low}")
        return value

    return parse


def _finite(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise _refuse(f"{text!r} is not a number") from None
    if not math.isfinite(value):
        raise _refuse(f"{text} is not finite")
    return value


def _positive(text: str) -> float:
    value = _finite(text)
    if value <= 0:
        raise _refuse(f"{text} is not above 0")
    return value


def _not_negative(text: str) -> float:
    value = _finite(text)
    if value < 0:
        raise _refuse(f"{text} is below 0")
    return value


def _share(text: str) -> float:
    value = _not_negative(text)
    if value > 1:
        raise _refuse(f"{text} is above 1")
    return value


def _url(text: str) -> str:
    if not re.fullmatch(r"https?://[^/\s]+(/\S*)?", text):
        raise _refuse(f"{text!r} is no http:// or https:// address")
    return text


def _optional_url(text: str) -> str:
    return _url(text) if text else ""


def _sweep(text: str) -> tuple[Cell, ...]:
    cells = []
    for part in text.split(","):
        concurrency, colon, requests = part.partition(":")
        cells.append(Cell(_whole(1)(concurrency), _whole(1)(requests) if colon else None))
    return tuple(cells)


def _disconnect_after(text: str) -> DisconnectAfter:
    if text in ("prefill", "random"):
        return DisconnectAfter(text)
    return DisconnectAfter("tokens", _whole(1)(text))


def _when(text: str) -> When:
    if text.endswith("%"):
        return When(None, _share(str(_finite(text[:-1]) / 100)))
    return When(_not_negative(text), None)


def _goal(text: str) -> tuple[str, float]:
    name, _, limit = text.partition(":")
    if name not in GOALS:
        raise _refuse(f"{text!r} is none of {', '.join(f'{goal}:MS' for goal in GOALS)}")
    return name, _positive(limit)
