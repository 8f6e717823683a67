from __future__ import annotations

import gzip
import json
import zlib

import pytest
from harness import Server
from hypothesis import given
from hypothesis import strategies as st

from ds4batch.server.unpack import PIECE_BYTES, BadEncoding, Unpacker

BODY = json.dumps({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}).encode()
PACKED = {
    "gzip": gzip.compress,
    "x-gzip": gzip.compress,
    "deflate": zlib.compress,
    "": bytes,
    "identity": bytes,
    "GZip": gzip.compress,
}


def unpacked(encoding: str, *chunks: bytes) -> bytes:
    unpacker = Unpacker(encoding)
    pieces = [piece for chunk in chunks for piece in unpacker.pieces(chunk)]
    unpacker.finish()
    return b"".join(pieces)


@given(st.binary(max_size=2000), st.sampled_from(sorted(PACKED)), st.integers(1, 50))
def test_any_body_comes_back_however_it_is_cut(body: bytes, encoding: str, size: int) -> None:
    packed = PACKED[encoding](body)
    assert unpacked(encoding, *(packed[at : at + size] for at in range(0, len(packed), size))) == body


def test_a_bomb_is_unpacked_in_pieces() -> None:
    packed = zlib.compress(b" " * (40 << 20))
    sizes = [len(piece) for piece in Unpacker("deflate").pieces(packed)]
    assert sum(sizes) == 40 << 20
    assert max(sizes) <= PIECE_BYTES


def test_gzip_may_have_several_members_and_deflate_may_lack_its_header() -> None:
    assert unpacked("gzip", gzip.compress(b"ab") + gzip.compress(b"cd")) == b"abcd"
    packer = zlib.compressobj(wbits=-15)
    assert unpacked("deflate", packer.compress(b"abc" * 100) + packer.flush()) == b"abc" * 100


@pytest.mark.parametrize(
    ("encoding", "data", "why"),
    [
        ("gzip", BODY, "no gzip data"),
        ("deflate", BODY, "no deflate data"),
        ("gzip", gzip.compress(BODY)[:-3], "cut short"),
        ("deflate", zlib.compress(BODY)[:-6], "cut short"),
        ("gzip", gzip.compress(BODY) + b"x" * 50, "no gzip data"),
        ("deflate", zlib.compress(BODY) + b"x", "more behind the end"),
        ("br", BODY, "'br' is not supported"),
        ("gzip, gzip", BODY, "'gzip, gzip' is not supported"),
    ],
)
def test_what_is_not_as_it_says_is_refused(server: Server, encoding: str, data: bytes, why: str) -> None:
    with pytest.raises(BadEncoding, match=why):
        unpacked(encoding, data)
    answer = server.request("POST", "/v1/chat/completions", data, {"Content-Encoding": encoding})
    assert answer.status == 400
    assert why in answer.body["error"]["message"]
    assert answer.body["error"]["message"].startswith("bad HTTP request: ")


@pytest.mark.parametrize("encoding", sorted(PACKED))
def test_a_packed_request_is_answered(server: Server, encoding: str) -> None:
    assert server.request("POST", "/v1/chat/completions", PACKED[encoding](BODY), {"Content-Encoding": encoding}).status == 200


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_a_bomb_is_refused_by_its_unpacked_size(server: Server, encoding: str) -> None:
    data = PACKED[encoding](b'{"a":"' + b" " * (80 << 20))
    answer = server.request("POST", "/v1/chat/completions", data, {"Content-Encoding": encoding})
    assert answer.status == 413
    assert server.chat().status == 200


@pytest.mark.parametrize("size", [PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 2 * PIECE_BYTES])
def test_bodies_about_as_long_as_a_piece_come_whole(size: int) -> None:
    body = bytes(range(256)) * (size // 256 + 1)
    for encoding in ("gzip", "deflate"):
        assert unpacked(encoding, PACKED[encoding](body[:size])) == body[:size]
