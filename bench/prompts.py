"""Builds the prompts of a load: how long, from which place of the corpus, and what keeps two of them apart.

Owns the shape of a prompt. A prompt is cut from the corpus at an offset that depends on the seed and the request's
index alone, so two runs ask about the same text. It also carries a nonce of 48 bits that depends on the run: without it
the second run would be served from what the first left in the server's memory. The nonce comes first, so that nothing
behind it can be shared; with a shared prefix it comes last, behind text that is the same in every request.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from bench import seeded
from bench.http_stream import ChatClient, Message, ServerUnusable

QUESTION = "\n\nIn a few paragraphs, retell the text above and say what is unusual about it."
ONE_LINE = "Explain in a few sentences how a lighthouse works."
FOLLOW_UP = "\n\nHow does this new part change your answer?"
CALIBRATION_CHARACTERS = 20_000  # as much as one calibration request sends, unless the prompts themselves are shorter
SHORTEST_CALIBRATION = 200
GUESSED_CHARACTERS_PER_TOKEN = 4.0
CALIBRATION_INDEX = "calibration"  # its nonces are nobody else's


@dataclass(frozen=True)
class PromptBook:
    """Makes every prompt of a run."""

    corpus: str
    seed: int
    run: str  # makes the nonces; the same run and seed give the same prompts to the letter
    prompt_tokens: int  # 0 asks one line instead
    shared_prefix: bool = False
    characters_per_token: float = GUESSED_CHARACTERS_PER_TOKEN
    frame_tokens: int = 0  # of a prompt without its slice: chat template, nonce, question

    def nonce(self, *what: object) -> str:
        """48 bits in hexadecimal."""
        return f"{seeded.digest(self.run, 'nonce', *what) >> 208:012x}"

    def slice(self, characters: int, *what: object) -> str:
        """`characters` of the corpus from an offset fixed by the seed and `what`; the corpus is a ring."""
        at = seeded.below(len(self.corpus), self.seed, "offset", *what)
        rounds = (at + characters) // len(self.corpus) + 1
        return (self.corpus * rounds)[at : at + characters]

    def single(self, index: int, tokens: int | None = None) -> list[Message]:
        """The messages of request `index`, of `tokens` tokens or of the run's usual length."""
        wanted = self.prompt_tokens if tokens is None else tokens
        if not wanted:
            nonce = self.nonce(index)
            return [_user(f"{ONE_LINE} [{nonce}]" if self.shared_prefix else f"[{nonce}] {ONE_LINE}")]
        return [_user(self._text(max(0, round((wanted - self.frame_tokens) * self.characters_per_token)), index))]

    def _text(self, characters: int, index: int | str) -> str:
        nonce = self.nonce(index)
        if self.shared_prefix:
            return f"{self.slice(characters, 'shared')}{QUESTION}\n[{nonce}]"
        return f"[{nonce}]\n{self.slice(characters, index)}{QUESTION}"

    def follow_up(self, session: int, turn: int, tokens: int) -> Message:
        """What a session says at a later turn: `tokens` tokens of text and a question. Its history keeps it apart."""
        characters = round(tokens * self.characters_per_token)
        return _user(self.slice(characters, "session", session, turn) + FOLLOW_UP)

    def for_load(self, number: int) -> PromptBook:
        """This book for one more load of the same run: the same text under other nonces."""
        return replace(self, run=f"{self.run}/{number}") if number else self

    async def calibrated(self, client: ChatClient, longest: int) -> PromptBook:
        """This book with the server's own characters per token, for prompts of up to `longest` tokens.

        The prompt's frame and then a prompt with text in it are sent, and usage.prompt_tokens of the two read: the
        first is what the chat template and the question take, the difference is what the text takes. A server that
        refuses the text (its context may be short) is asked again with half of it. Raises ServerUnusable.
        """
        if not longest:
            return self
        frame = await client.count_prompt_tokens([_user(self._text(0, CALIBRATION_INDEX))])
        guess = round(longest * GUESSED_CHARACTERS_PER_TOKEN)
        characters = max(SHORTEST_CALIBRATION, min(CALIBRATION_CHARACTERS, guess))
        while True:
            try:
                count = await client.count_prompt_tokens([_user(self._text(characters, CALIBRATION_INDEX))])
            except ServerUnusable:
                characters //= 2
                if characters < SHORTEST_CALIBRATION:
                    raise
                continue
            if count <= frame:
                raise ServerUnusable(f"{characters} characters more left usage.prompt_tokens at {count} instead of {frame}")
            return replace(self, characters_per_token=characters / (count - frame), frame_tokens=frame)


def _user(text: str) -> Message:
    return {"role": "user", "content": text}
