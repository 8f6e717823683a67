"""Token counts of an answer as OpenAI shapes them."""

from __future__ import annotations

from typing import Any

from ds4batch.messages import Finished


def openai_usage(finished: Finished) -> dict[str, Any]:
    """`cached_tokens` were reused from a session, `cache_write_tokens` are the rest of the prompt; never both."""
    prompt, generated = finished.prompt_tokens, finished.completion_tokens
    cached = max(0, min(finished.cached_tokens, prompt))
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": cached, "cache_write_tokens": prompt - cached},
    }
