"""The output items of a Responses answer: each announces itself, passes on what it is made of, and closes for good.

An item owns its object in the answer's output, which its last event shows as it stays. It does not know its neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from ds4batch.chat.conversation import Tool
from ds4batch.chat.schemas import compact, members
from ds4batch.server.apis.responses_reasoning import seal

Object = dict[str, Any]


class Send(Protocol):
    """Writes one event."""

    def __call__(self, kind: str, **members: Any) -> None: ...


class Item:
    """What all items share. `shape` is the item's object; it is open until `close`."""

    def __init__(self, send: Send, index: int, shape: Object) -> None:
        self.shape = shape
        self._send = send
        self._place = {"item_id": shape["id"], "output_index": index}
        self._index = index
        self._text: list[str] = []
        self._send("response.output_item.added", output_index=index, item=shape)

    def _end(self, complete: bool, **members: Any) -> None:
        self.shape.update(members, status="completed" if complete else "incomplete")
        self._send("response.output_item.done", output_index=self._index, item=self.shape)


class ReasoningItem(Item):
    """One block of reasoning: shown as a summary that is the reasoning itself, sealed, or both."""

    def __init__(self, send: Send, index: int, id: str, *, shown: bool, sealed: bool) -> None:
        super().__init__(send, index, {"id": id, "type": "reasoning", "status": "in_progress", "summary": []})
        self._shown, self._sealed = shown, sealed
        self._place["summary_index"] = 0
        if shown:
            self._send("response.reasoning_summary_part.added", **self._place, part=_summary(""))

    def push(self, text: str) -> None:
        """A piece of it."""
        self._text.append(text)
        if self._shown:
            self._send("response.reasoning_summary_text.delta", **self._place, delta=text)

    def close(self, complete: bool) -> None:
        """Complete when the model closed its reasoning."""
        text = "".join(self._text)
        members: Object = {}
        if self._shown:
            self._send("response.reasoning_summary_text.done", **self._place, text=text)
            self._send("response.reasoning_summary_part.done", **self._place, part=_summary(text))
            members["summary"] = [_summary(text)]
        if self._sealed:
            members["encrypted_content"] = seal(text)
        self._end(complete, **members)


class MessageItem(Item):
    """A stretch of the answer's text. With log-probabilities where `logprobs` says that the request wants them."""

    def __init__(self, send: Send, index: int, id: str, *, logprobs: bool) -> None:
        shape = {"id": id, "type": "message", "status": "in_progress", "role": "assistant", "content": []}
        super().__init__(send, index, shape)
        self._logprobs: list[Object] | None = [] if logprobs else None
        self._place["content_index"] = 0
        self._send("response.content_part.added", **self._place, part=self._part())

    def push(self, text: str, logprobs: Sequence[Object]) -> None:
        """A piece of it, and the log-probabilities of the tokens it came from."""
        self._text.append(text)
        if self._logprobs is not None:
            self._logprobs += logprobs
        self._send("response.output_text.delta", **self._place, delta=text, logprobs=logprobs)

    def close(self, complete: bool) -> None:
        """Complete unless the answer broke off in it."""
        part = self._part()
        self._send("response.output_text.done", **self._place, text=part["text"], logprobs=part.get("logprobs", []))
        self._send("response.content_part.done", **self._place, part=part)
        self._end(complete, content=[part])

    def _part(self) -> Object:
        part: Object = {"type": "output_text", "text": "".join(self._text), "annotations": []}
        return part if self._logprobs is None else part | {"logprobs": list(self._logprobs)}


class FunctionItem(Item):
    """A call whose arguments are the text of a JSON object."""

    def __init__(self, send: Send, index: int, id: str, call_id: str, names: Object) -> None:
        shape = {"id": id, "type": "function_call", "status": "in_progress", **names, "call_id": call_id, "arguments": ""}
        super().__init__(send, index, shape)
        self._names = names

    def push(self, text: str) -> None:
        """A piece of the arguments."""
        self._text.append(text)
        self._send("response.function_call_arguments.delta", **self._place, delta=text)

    def close(self, complete: bool) -> None:
        """Incomplete arguments are not declared done: a client may run a call as soon as they are."""
        arguments = "".join(self._text)
        if complete:
            self._send("response.function_call_arguments.done", **self._place, **self._names, arguments=arguments)
        self._end(complete, arguments=arguments)


class CustomItem(Item):
    """A call that takes one text, which shows only when it is whole."""

    def __init__(self, send: Send, index: int, id: str, call_id: str, names: Object) -> None:
        shape = {"id": id, "type": "custom_tool_call", "status": "in_progress", **names, "call_id": call_id, "input": ""}
        super().__init__(send, index, shape)

    def push(self, text: str) -> None:
        """A piece of the arguments."""
        self._text.append(text)

    def close(self, complete: bool) -> None:
        """The text is taken out of its JSON."""
        self._end(complete, input=custom_input("".join(self._text)))


class SearchItem(Item):
    """A search for tools, which the client runs; its arguments are an object."""

    def __init__(self, send: Send, index: int, id: str, call_id: str) -> None:
        shape: Object = {"id": id, "type": "tool_search_call", "status": "in_progress", "call_id": call_id}
        super().__init__(send, index, shape | {"execution": "client", "arguments": {}})

    def push(self, text: str) -> None:
        """A piece of the arguments."""
        self._text.append(text)

    def close(self, complete: bool) -> None:
        """Arguments that are no object cannot be shown as one, and count as none."""
        arguments = "".join(self._text)
        if members(arguments) is not None:
            self.shape["arguments"] = msgspec.Raw(compact(arguments).encode())  # no number of a client's is too large for it
        self._end(complete)


CallItem = FunctionItem | CustomItem | SearchItem


def custom_input(arguments: str) -> str:
    """What a custom tool is given: the one string among the arguments; nothing for none; anything else is passed as it is."""
    found = members(arguments)
    if found is None or len(found) > 1:
        return arguments
    if not found:
        return ""
    text = found[0][1]
    return arguments if text is None else text


def wire_names(name: str, tool: Tool | None) -> Object:
    """How the client knows a tool that the prompt calls `name`: a name, and its namespace where it has one."""
    if tool is None:
        return {"name": name}
    return {"name": tool.wire_name, "namespace": tool.namespace} if tool.namespace else {"name": tool.wire_name}


def _summary(text: str) -> Object:
    return {"type": "summary_text", "text": text}
