"""Compressed request bodies, unpacked a little at a time. Not left to aiohttp, which would unpack on the event loop without a pause,
even the rest of a body that was refused already."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

ENCODINGS = ("gzip", "x-gzip", "deflate")
PIECE_BYTES = 256 << 10
_GZIP, _ZLIB, _RAW = 31, 15, -15  # zlib's words for the three formats


class BadEncoding(ValueError):
    """The body is not what its Content-Encoding says."""


class Unpacker:
    """The body of one request."""

    def __init__(self, encoding: str) -> None:
        """`encoding`: of the header, "" and "identity" for none. Raises BadEncoding for one that is not known."""
        self._name = encoding.strip().lower()
        if self._name not in ("", "identity", *ENCODINGS):
            raise BadEncoding(f"Content-Encoding {encoding[:40]!r} is not supported, {', '.join(ENCODINGS)} are")
        self._packed = self._name in ENCODINGS
        self._inner = zlib.decompressobj(_GZIP)
        self._begun = False

    def pieces(self, data: bytes) -> Iterator[bytes]:
        """What these bytes stand for, in pieces of limited size. Raises BadEncoding."""
        if not self._packed:
            yield data
            return
        if not self._begun and data and self._name == "deflate":
            # Some write it without the header of zlib, which the standard asks for.
            self._inner = zlib.decompressobj(_ZLIB if data[0] & 15 == 8 else _RAW)
        self._begun = self._begun or bool(data)
        full = False
        while data or full:  # zlib may hold more when it gave as much as it was asked for
            if self._inner.eof and data:  # gzip may go on with another member
                if self._name == "deflate":
                    raise BadEncoding(f"there is more behind the end of the {self._name} data")
                self._inner = zlib.decompressobj(_GZIP)
            try:
                piece = self._inner.decompress(data, PIECE_BYTES)
            except zlib.error:
                raise BadEncoding(f"the body is no {self._name} data") from None
            data, full = self._inner.unconsumed_tail or self._inner.unused_data, len(piece) == PIECE_BYTES
            if piece:
                yield piece

    def finish(self) -> None:
        """No byte follows. Raises BadEncoding for data that is cut short."""
        if self._packed and self._begun and not self._inner.eof:
            raise BadEncoding(f"the {self._name} data is cut short")
