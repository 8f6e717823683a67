"""Token texts as vocabularies spell them -> the bytes they stand for.

Byte-level BPE spells every byte as one printable character (GPT-2's `bytes_to_unicode`): printable Latin-1 bytes are
themselves, the other 68 are U+0100 and up, in order. SentencePiece spells a space as U+2581 and a lone byte as
`<0xNN>`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_PRINTABLE = frozenset((*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)))


def _alphabet() -> dict[int, int]:
    """Code point -> byte. Latin-1 characters that spell no byte lead past Latin-1, so that encoding fails on them."""
    hidden = [byte for byte in range(256) if byte not in _PRINTABLE]
    table = {byte: byte for byte in _PRINTABLE}
    table.update({0x100 + i: byte for i, byte in enumerate(hidden)})
    table.update(dict.fromkeys(hidden, 0xFFFD))
    return table


_ALPHABET = _alphabet()
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_level(tokens: Iterable[str]) -> list[bytes]:
    """Bytes of each token of a byte-level vocabulary; one that is not spelled in the alphabet stands for its text."""
    out = []
    for token in tokens:
        try:
            out.append(token.translate(_ALPHABET).encode("latin-1"))
        except UnicodeEncodeError:
            out.append(token.encode())
    return out


def sentence_piece(tokens: Iterable[str]) -> list[bytes]:
    """Bytes of each token of a SentencePiece vocabulary."""
    out = []
    for token in tokens:
        lone = _BYTE_TOKEN.fullmatch(token)
        out.append(bytes([int(lone[1], 16)]) if lone else token.replace("\u2581", " ").encode())
    return out
