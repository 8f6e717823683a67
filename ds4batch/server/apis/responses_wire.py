"""The answer of POST /v1/responses: the events of a turn as its stream, and as one object that is what the stream adds up to.

Items follow each other and never overlap: an item closes before the next opens, so that a client that keeps them as they close keeps
them in the order the model wrote them. Each opens with the first text it holds. Knows no HTTP.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from ds4batch.chat.conversation import Tool
from ds4batch.chat.events import CallBroken, CallDelta, CallEnd, CallStart, Content, Reasoning, ReasoningEnd, Turn, TurnEvent
from ds4batch.messages import Finished, TokenLogprob
from ds4batch.server import sse
from ds4batch.server.apis.responses import ResponsesRequest
from ds4batch.server.apis.responses_items import (
    CallItem,
    CustomItem,
    FunctionItem,
    MessageItem,
    Object,
    ReasoningItem,
    SearchItem,
    wire_names,
)
from ds4batch.server.apis.tools import ToolChoice
from ds4batch.server.logprobs import chat_shape
from ds4batch.server.service import Tokenizer

_STATUS = {"stop": "completed", "tool_calls": "completed", "length": "incomplete"}
"""By reason of the end; any other is a failure."""


AnyItem = ReasoningItem | MessageItem | CallItem


def _random_id(prefix: str) -> str:
    return prefix + secrets.token_hex(12)


class ResponsesWire:
    """One answer. Stream parts are complete events, ready to be sent; whatever is called first opens the stream.

    An answer that is not streamed is given to `events` all the same, and ends with `whole` in place of `closing`. Log-probabilities
    are written when a tokenizer to spell them is given. `new_id` makes the ids of the response and its items from a prefix.
    """

    def __init__(
        self,
        request: ResponsesRequest,
        tokenizer: Tokenizer | None = None,
        *,
        new_id: Callable[[str], str] = _random_id,
    ) -> None:
        self._tools = {tool.name: tool for tool in request.tools}
        self._summary, self._sealed = request.summary, request.sealed
        self._tokenizer = tokenizer
        self._new_id = new_id
        self._response: Object = {
            "id": new_id("resp_"),
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "model": request.model,
            "output": [],
            "error": None,
            "incomplete_details": None,
            "parallel_tool_calls": True,
            "tool_choice": _echoed(request.choice, self._tools),
            "tools": [],
            "usage": None,
        }
        self._output: list[Object] = []
        self._item: AnyItem | None = None  # the last of them, while it is open
        self._logprobs: list[TokenLogprob] = []  # of tokens whose text was held back
        self._sequence = 0
        self._sent = bytearray()

    def opening(self, cached_tokens: int = 0) -> bytes:
        """The response as it begins; nothing when it has begun. The usage comes at the end."""
        self._open()
        return self._taken()

    def keepalive(self) -> bytes:
        """The response as it begins, again: clients wait for events, and a comment is none."""
        self._open()
        self._send("response.in_progress", response=self._response)
        return self._taken()

    def events(self, events: Sequence[TurnEvent], logprobs: Sequence[TokenLogprob]) -> bytes:
        """What the model wrote next, and the log-probabilities of its tokens, of which those of text are kept."""
        self._open()
        if self._tokenizer is not None:
            self._logprobs += logprobs
        for event in events:
            self._add(event)
        if events:
            self._logprobs = []  # what is left belongs to reasoning or to a call
        return self._taken()

    def closing(self, finished: Finished) -> bytes:
        """What ends a stream that was answered."""
        self._open()
        response = self._ended(finished)
        self._send("response." + response["status"], response=response)
        return self._taken()

    def failed(self, message: str) -> bytes:
        """The end of a stream that cannot be answered; nothing may follow."""
        self._open()
        self._leave(False)
        self._send("response.failed", response=self._response | {"output": self._output, **_failure(message)})
        return self._taken()

    def whole(self, turn: Turn, logprobs: Sequence[TokenLogprob], finished: Finished) -> dict[str, Any]:
        """The answer in one object, to be encoded by msgspec.

        `turn` and `logprobs` are the sums of what `events` was given. The object is made of that and not of them: its items stand in
        the order in which the model wrote them, and a sum has none.
        """
        return self._ended(finished)

    def _ended(self, finished: Finished) -> Object:
        status = _STATUS.get(finished.reason, "failed")
        self._leave(status == "completed")
        response = self._response | {"status": status, "output": self._output, "usage": usage(finished)}
        if status == "incomplete":
            return response | {"incomplete_details": {"reason": "max_output_tokens"}}
        return response | _failure("generation failed") if status == "failed" else response

    def _open(self) -> None:
        if not self._sequence:
            self._send("response.created", response=self._response)

    def _add(self, event: TurnEvent) -> None:
        match event:
            case Reasoning(text):
                if text and (self._summary or self._sealed):
                    self._reasoning().push(text)
            case ReasoningEnd():
                if isinstance(self._item, ReasoningItem):
                    self._end(self._item, True)
            case Content(text):
                if text:
                    self._message().push(text, self._spelled())
            case CallStart(_, id, name):
                self._call(id, name)
            case CallDelta(_, text):
                if isinstance(self._item, CallItem):
                    self._item.push(text)
            case CallEnd() | CallBroken():
                if isinstance(self._item, CallItem):
                    self._end(self._item, isinstance(event, CallEnd))

    def _reasoning(self) -> ReasoningItem:
        item = self._item
        if not isinstance(item, ReasoningItem):
            id, index = self._next("rs_")
            item = ReasoningItem(self._send, index, id, shown=self._summary, sealed=self._sealed)
            self._keep(item)
        return item

    def _message(self) -> MessageItem:
        item = self._item
        if not isinstance(item, MessageItem):
            id, index = self._next("msg_")
            item = MessageItem(self._send, index, id, logprobs=self._tokenizer is not None)
            self._keep(item)
        return item

    def _call(self, call_id: str, name: str) -> None:
        tool = self._tools.get(name)
        names = wire_names(name, tool)
        match "function" if tool is None else tool.kind:
            case "custom":
                id, index = self._next("ctc_")
                self._keep(CustomItem(self._send, index, id, call_id, names))
            case "tool_search":
                id, index = self._next("tsc_")
                self._keep(SearchItem(self._send, index, id, call_id))
            case _:
                id, index = self._next("fc_")
                self._keep(FunctionItem(self._send, index, id, call_id, names))

    def _next(self, prefix: str) -> tuple[str, int]:
        """Id and place of an item about to open, behind the one that ends with that."""
        self._leave(True)
        return self._new_id(prefix), len(self._output)

    def _keep(self, item: AnyItem) -> None:
        self._item = item
        self._output.append(item.shape)

    def _leave(self, well: bool) -> None:
        """End the open item, if there is one, that did not end itself. Text may end so where all is well, nothing else."""
        if self._item is not None:
            self._end(self._item, well and isinstance(self._item, MessageItem))

    def _end(self, item: AnyItem, complete: bool) -> None:
        item.close(complete)
        self._item = None

    def _spelled(self) -> list[Object]:
        if self._tokenizer is None:
            return []
        items, self._logprobs = self._logprobs, []
        return chat_shape(self._tokenizer, items)

    def _send(self, kind: str, **members: Any) -> None:
        event = {"type": kind, "sequence_number": self._sequence, **members}
        self._sequence += 1
        self._sent += sse.data(msgspec.json.encode(event))

    def _taken(self) -> bytes:
        sent, self._sent = self._sent, bytearray()
        return bytes(sent)


def usage(finished: Finished) -> Object:
    """Token counts as this API names them. `cached_tokens` were reused, `cache_write_tokens` are the rest of the prompt."""
    prompt, generated = finished.prompt_tokens, finished.completion_tokens
    cached = max(0, min(finished.cached_tokens, prompt))
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": prompt - cached},
        "output_tokens": generated,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + generated,
    }


def _failure(message: str) -> Object:
    return {"status": "failed", "error": {"code": "server_error", "message": message}}


def _echoed(choice: ToolChoice, tools: Mapping[str, Tool]) -> Any:
    """The request's tool choice as it was put."""
    if choice.mode != "named":
        return choice.mode
    tool = tools[choice.name]
    return {"type": tool.kind, **wire_names(tool.name, tool)}
