"""The messages between the front and the engine process, and their encoding.

One socket pair, both directions: a 4-byte little-endian length, then one MessagePack value encoded by msgspec. Times are
`time.monotonic()` seconds, which the two processes share because they run on one host.
"""

from __future__ import annotations

import struct
from typing import Literal

import msgspec

from ds4batch.chat.events import TurnEvent

API = Literal["chat", "completions", "responses", "anthropic"]
FinishReason = Literal["stop", "length", "tool_calls", "abort", "error"]
CancelCause = Literal["client", "slow_reader", "shutdown", "stall", "deadline"]

PRODUCTS_DIFFER = "matrix products depend on the row count"
ATTENTION_DIFFERS = "attention depends on the query count or the context length"
FORWARD_DIFFERS = "a forward of many rows differs from a forward of one"
FALLBACKS = (PRODUCTS_DIFFER, ATTENTION_DIFFERS, FORWARD_DIFFERS)
"""Why forwards may be ordered: what the engine's self-test can find."""


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How one request draws its tokens. Every field is already checked and clamped by the front."""

    temperature: float = 1.0  # 0 is greedy: the highest logit, ties to the lowest id
    top_k: int = 0  # 0 is off
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    logprobs: int | None = None  # None: none wanted; n: the token's and those of the n most likely
    ignore_eos: bool = False  # stop tokens cannot be drawn


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """The log-probability of one generated token, natural log, and of its most likely rivals."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


# front -> engine


class Visible(msgspec.Struct, frozen=True, array_like=True):
    """How the next request of a conversation will begin: as this one's text up to a place, then otherwise, then the answer."""

    shared: int  # characters
    head: str
    trimmed: Literal["", "start", "both"] = ""  # where the answer loses white space when it is shown again


class Continues(msgspec.Struct, frozen=True, array_like=True):
    """The end of a request that brings the results of calls."""

    calls: list[str]  # their ids
    suffix_from: int  # character of the text at which everything begins that follows the calls' last sampled token


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """How an answer is read."""

    grammar: str  # of chat/grammars
    thinking: bool  # the prompt ends inside the model's reasoning
    tools: dict[str, list[str]] | None = None  # the functions it may call, each with its string parameters; None: no calls are read
    ids: str = "call_"  # what the ids of its calls begin with


class Constraint(msgspec.Struct, frozen=True, kw_only=True):
    """What an answer is held to behind its reasoning."""

    grammar: str  # as llguidance reads it
    calls: bool  # there are calls in it: it spells markup
    field: str = "response_format"  # of the request, that wants it: what an error names


class Submit(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One request: tokens to continue, and how."""

    id: int
    tokens: list[int]
    text: str  # what `tokens` was made from; the text tier of the reuse ladder compares it
    max_tokens: int
    sampling: Sampling
    stop: list[str] = []
    api: API = "chat"
    arrival: float
    anchor: int = 0  # tokens before the first user message, where conversations with one system prompt part; 0 when unknown
    generation_from: int | None = None  # character of the text at which the opening of the answer begins
    visible: Visible | None = None
    continues: Continues | None = None
    needs_live_state: bool = False  # it carries no history: without what it continues it is refused
    reading: Reading | None = None  # None: the answer is text and nothing else
    replayed: dict[str, str] = {}  # ids of calls in the prompt -> the text that they were replayed as
    constraint: Constraint | None = None  # None: the model writes what it wants
    owner: str = ""  # who shares the engine fairly with the others; without names all are one
    owner_limit: int = 0  # requests of this owner that may run at once; 0 is no limit
    owner_weight: float = 1.0  # of its share


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Stop working on a request. Unknown or finished ids are ignored."""

    id: int
    cause: CancelCause


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """Take no more requests, end the running ones, leave."""


class Ping(msgspec.Struct, frozen=True, tag=True):
    """Answer with a Pong between two steps, whether there is work or not."""


ToEngine = Submit | Cancel | Shutdown | Ping


# engine -> front


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The model is loaded and the sessions are resident."""

    device: str
    dtype: str
    parameters: int
    exact_path: Literal["native", "ordered"]
    page_tokens: int
    memory: dict[str, int]  # bytes by kind: weights, kv_per_session, kv_total, kv_pool, scratch, naive_total, shared_total
    load_seconds: float


class StartFailed(msgspec.Struct, frozen=True, tag=True):
    """The engine cannot start; the message names the file, the option or the numbers."""

    message: str


class Divergence(msgspec.Struct, frozen=True, kw_only=True):
    """Where a prompt leaves the session that shares most of it; the texts are 17 tokens around the first that differs."""

    slot: int
    at: int  # tokens that both begin with
    live: int  # tokens of the session
    held: str
    asked: str
    held_tokens: list[int] = []  # the ids of `held`


class Routed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A request has its slot."""

    id: int
    slot: int
    tier: str
    cached_tokens: int
    victim: str  # none, empty, stale, protected
    evicted_tokens: int
    queue_seconds: float
    fell_from: str | None = None  # the tier that was promised and could not be carried out
    divergence: Divergence | None = None  # when a session was cut or none was continued
    source: str = ""  # the checkpoint on disk that it continues
    restore_seconds: float = 0.0  # that it took to come


class Progress(msgspec.Struct, frozen=True, tag=True):
    """Prompt tokens evaluated so far, out of all."""

    id: int
    done: int
    total: int


class Delta(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """New text of one request; several tokens may arrive in one, and a token may bring no text yet."""

    id: int
    text: str  # as it was sampled
    events: list[TurnEvent] = []  # what it is, with a `Reading`
    tokens: int  # tokens drawn since the last delta
    logprobs: list[TokenLogprob] = []


class Finished(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The last message of a request that was answered."""

    id: int
    reason: FinishReason
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    queue_seconds: float
    prefill_seconds: float
    decode_seconds: float
    drafts: int = 0  # tokens guessed ahead for it and checked
    drafts_accepted: int = 0
    rest: list[TurnEvent] = []  # what was held back to the end
    raw: str | None = None  # the text of all calls of the turn as it was sampled, with what separates it from the content
    malformed: str = ""  # why calls could not be read; `rest` is their text then


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The last message of a request that was not answered."""

    id: int
    status: int  # the HTTP status the front gives when nothing was sent yet
    message: str
    retry_after: float | None = None  # seconds, with 429


Event = Routed | Progress | Delta | Finished | Failed


class StepSample(msgspec.Struct, frozen=True, array_like=True):
    """What one forward did, for the histograms."""

    decode_rows: int
    prefill_tokens: int
    seconds: float
    fallback: str | None  # why the ordered path ran, None on the native one
    checked_rows: int = 0  # of the decode rows, those that had drafts
    drafts: int = 0  # checked, over all rows
    accepted: list[int] = []  # of the first drafts, of the second ones, ...


class Transfer(msgspec.Struct, frozen=True, array_like=True):
    """One checkpoint that went to the disk or came from it."""

    load: bool
    seconds: float
    size: int  # bytes


class DiskStat(msgspec.Struct, frozen=True, kw_only=True):
    """The checkpoints on disk: what they take now, and by reason what was done since the engine started."""

    files: int
    bytes: int
    stored: dict[str, int]
    known: dict[str, int]
    skipped: dict[str, int]
    loaded: dict[str, int]
    evicted: dict[str, int]
    removed: dict[str, int]
    left: dict[str, int]


class PoolStat(msgspec.Struct, frozen=True, kw_only=True):
    """The KV pool: its pages now, and what was done since the engine started."""

    pages: int
    page_bytes: int
    used: int  # not free; a page that sessions share counts once
    unshared: int  # pages that the sessions would hold if nothing were shared
    parked: int  # pages in host memory
    parks: int
    resumes: int
    evicted_stale: int  # tokens of idle sessions whose pages others needed
    evicted_protected: int


class PriceStat(msgspec.Struct, frozen=True, array_like=True):
    """What is known of drafting for widths of `low` to `high` sessions. Seconds are 0 while they are unknown."""

    low: int
    high: int
    acceptance: float
    tokens: float  # that a session commits in a cycle with drafts
    plain_seconds: float
    speculative_seconds: float
    drafting: bool  # as the prices stand


class DraftStat(msgspec.Struct, frozen=True, kw_only=True):
    """The prices of drafting, by width, and how cycles were decided since the engine started."""

    prices: list[PriceStat]
    decisions: dict[str, int]


class SlotStat(msgspec.Struct, frozen=True, array_like=True):
    """One slot as it stands between two steps."""

    state: str  # empty, idle, stale, prefill, restore, decode, parked
    live_tokens: int
    prefill_done: int
    prefill_total: int
    pages: int = 0  # of the KV pool, that the session holds
    own_pages: int = 0  # of those, that nobody else holds


class OwnerStat(msgspec.Struct, frozen=True, array_like=True):
    """What one owner has in the engine, and what was done for it since the engine started."""

    owner: str
    waiting: int
    running: int
    tokens: int  # evaluated, not reused, and generated


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    """Gauges, complete at one instant between two steps."""

    running: int
    waiting: int
    kv_usage: float  # 0..1
    slots: list[SlotStat]
    device_memory: int = 0  # bytes in use on the device, 0 where unknown
    pool: PoolStat | None = None
    drafts: DraftStat | None = None  # None where nothing is drafted
    disk: DiskStat | None = None  # None without a store, and when nothing changed
    owners: list[OwnerStat] = []  # none while nobody has a name


class Report(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """All that happened since the last one: one message a step, whatever the number of rows."""

    events: list[Event] = []
    steps: list[StepSample] = []
    transfers: list[Transfer] = []
    stats: Stats | None = None


class Pong(msgspec.Struct, frozen=True, tag=True):
    """The engine's main loop is alive."""


class Bye(msgspec.Struct, frozen=True, tag=True):
    """The engine leaves in order, after a Shutdown."""


FromEngine = Ready | StartFailed | Report | Pong | Bye

_encoder = msgspec.msgpack.Encoder()
_to_engine: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
_from_engine: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)

HEADER = struct.Struct("<I")


def frame(message: ToEngine | FromEngine) -> bytes:
    """One message as it goes over the socket."""
    body = _encoder.encode(message)
    return HEADER.pack(len(body)) + body


def decode_to_engine(body: bytes) -> ToEngine:
    """The message in a frame's body. Raises msgspec.DecodeError."""
    return _to_engine.decode(body)


def decode_from_engine(body: bytes) -> FromEngine:
    """The message in a frame's body. Raises msgspec.DecodeError."""
    return _from_engine.decode(body)
