"""Whether an answer to a hostile request is one: its status, its shape by the description, and that a refusal names the field."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

import jsonschema_rs

from bench.hostile.case import MESSAGES, Case
from bench.hostile.client import Outcome
from bench.hostile.http_answers import Answer

_SHOWN = 200
_WHOLE_BODY = ("invalid JSON request", "bad HTTP request")
_OVERFLOW = "prompt is too long:"  # Anthropic's words, which name no field
_MEANING = {
    "context": r"configured context size|prompt is too long",
    "no vision, text only": r"has no vision|takes text only|images belong in user messages|a tool_result holds text and images",
    "the form cannot be enforced": r"cannot be enforced|the loaded model cannot call tools",
    "an unknown call": r"continuation state is not available",
    "no such tool": r"no tool is named|there are no tools",
    "tools of one name": r"another tool is called",
    "token ids beyond the vocabulary": r"is not a token id below|expected a token id below",
    "fields that exclude each other": (r"needs logprobs to be true|requires an explicit temperature|of a given form ends"),
    "nothing is said": r"there is only empty system text|the prompt has no tokens",
    "the family's own rule": r"^messages: (?!expected|must|missing)[^:]*$|^input: (?!expected|must|missing)[^:]*$",
}
"""Why a request of the described form may be refused all the same: for what it means. Anything else is a fault of the description."""


class Oracle:
    """Judges against one description."""

    def __init__(self, description: Mapping[str, Any]) -> None:
        self._paths: Mapping[str, Any] = description["paths"]
        self._components = description["components"]
        self._validators: dict[str, Any] = {}
        self.statuses: Counter[int] = Counter()
        self.refused_by_meaning: Counter[str] = Counter()

    def problems(self, case: Case, outcome: Outcome) -> list[str]:
        """What is wrong with it, nothing for a good one."""
        if outcome.end in ("hung", "unconnected"):
            return [f"{outcome.end} after {outcome.seconds:.1f} s, {len(outcome.raw)} bytes received"]
        if outcome.problem:
            return [outcome.problem]
        if case.ending == "abort":
            return []
        found = [problem for answer in outcome.answers for problem in self._answer(case, answer)]
        if outcome.end == "closed" and not outcome.answers and not case.closes:
            found.append("the connection was closed without an answer")
        if outcome.end == "closed" and not case.closes and 0 < len(outcome.answers) < case.answers:
            found.append(f"{len(outcome.answers)} answers of {case.answers}")
        if outcome.end == "left":
            status = re.match(rb"HTTP/1\.1 (\d+)", outcome.raw)
            if status is None or int(status[1]) >= 500:
                found.append(f"begins with {outcome.raw[:60]!r}")
        return found

    def _answer(self, case: Case, answer: Answer) -> list[str]:
        self.statuses[answer.status] += 1
        shown = answer.body[:_SHOWN].decode("utf-8", "replace")
        operation = self._operation(case)
        if case.statuses is not None:
            allowed = case.statuses
        elif operation is None:
            allowed = frozenset({400, 404, 405})
        else:
            allowed = frozenset(map(int, operation["responses"]))
        # A failure of the server's is never an answer to a request, described or not: nothing was done to the server.
        if answer.status not in allowed or answer.status == 500:
            return [f"status {answer.status}, expected one of {sorted(allowed - {500})}: {shown}"]
        found = []
        if answer.status >= 400 and case.method != "HEAD":
            found += self._error(case, answer, operation)
        elif answer.status == 200 and operation is not None and case.method != "HEAD":
            found += self._success(case, answer, operation)
        return found

    def _operation(self, case: Case) -> Mapping[str, Any] | None:
        found: Mapping[str, Any] | None = self._paths.get(case.path, {}).get(case.method.lower())
        return found

    def _error(self, case: Case, answer: Answer, operation: Mapping[str, Any] | None) -> list[str]:
        shown = answer.body[:_SHOWN].decode("utf-8", "replace")
        try:
            body = answer.json
        except ValueError:
            return [f"an error that is no JSON: {shown}"]
        name = "AnthropicError" if case.path.startswith(MESSAGES) else "OpenAIError"
        named = isinstance(body, dict) and body.get("type") == "error"
        if operation is None and not case.path:
            name = "AnthropicError" if named else "OpenAIError"
        if problem := self._invalid(answer.json, {"$ref": f"#/components/schemas/{name}"}):
            return [f"an error of another shape: {problem}: {shown}"]
        error = body["error"]
        if answer.status != 400 or operation is None or "requestBody" not in operation:
            return []
        members = self._members(operation)
        found = [] if _names_field(error, members) else [f"a refusal that names no field: {shown}"]
        if case.valid and not found:
            reason = next((why for why, words in _MEANING.items() if re.search(words, error["message"])), None)
            if reason is None:
                return [f"refused although it is as described: {shown}"]
            self.refused_by_meaning[reason] += 1
        return found

    def _success(self, case: Case, answer: Answer, operation: Mapping[str, Any]) -> list[str]:
        kind = answer.headers.get("content-type", "").split(";")[0]
        content = operation["responses"]["200"]["content"]
        if kind not in content:
            return [f"content of the type {kind!r}"]
        if kind == "text/event-stream":
            return _stream(case.path, answer)
        if kind != "application/json":
            return []
        try:
            problem = self._invalid(answer.json, content[kind]["schema"])
        except ValueError:
            return [f"an answer that is no JSON: {answer.body[:_SHOWN]!r}"]
        return [f"an answer of another shape: {problem}"] if problem else []

    def _members(self, operation: Mapping[str, Any]) -> frozenset[str]:
        ref = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        return frozenset(self._components["schemas"][ref.rsplit("/")[-1]]["properties"])

    def _invalid(self, value: Any, schema: Mapping[str, Any]) -> str:
        key = json.dumps(schema)
        if key not in self._validators:
            self._validators[key] = jsonschema_rs.validator_for({**schema, "components": self._components})
        error = next(self._validators[key].iter_errors(value), None)
        return "" if error is None else f"{'.'.join(map(str, error.instance_path))}: {error.message}"[:_SHOWN]


def _names_field(error: Mapping[str, Any], members: frozenset[str]) -> bool:
    message = error["message"]
    if message.startswith((*_WHOLE_BODY, _OVERFLOW)) or error.get("param") in members:
        return True
    words = re.match(r"(?:missing )?([a-z_]+)", message)
    return (words is not None and words[1] in members) or "for tool_use_id " in message


def _stream(path: str, answer: Answer) -> list[str]:
    """What is wrong with a stream: it must be events of JSON with the end that its API has."""
    events = answer.events
    if not answer.body.endswith(b"\n\n") or not events:
        return [f"a stream that ends with {answer.body[-60:]!r}"]
    last = events[-1]
    if path in ("/v1/messages", "/v1/responses"):
        ends: tuple[str, ...] = (
            ("message_stop", "error")
            if path == "/v1/messages"
            else ("response.completed", "response.incomplete", "response.failed")
        )
        kind = json.loads(last).get("type")
        if kind not in ends:
            return [f"a stream that ends with {kind!r}"]
        return ["a stream that ends with an error: " + last[:_SHOWN].decode()] if kind in ("error", "response.failed") else []
    try:
        parsed = [json.loads(event) for event in events if event != b"[DONE]"]
    except ValueError:
        return ["a stream of events that are no JSON"]
    if failed := next((event for event in parsed if "error" in event), None):
        return [f"a stream that ends with an error: {str(failed)[:_SHOWN]}"]
    return [] if last == b"[DONE]" else [f"a stream that ends with {last[:60]!r}"]
