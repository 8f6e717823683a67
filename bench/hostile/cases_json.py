"""Bodies that no JSON library writes: broken text, depth, width, doubled members, and bytes that are no text."""

from __future__ import annotations

import functools
import gzip
import json
import zlib
from collections.abc import Sequence

from bench.hostile.case import CHAT, POSTS, Case, base, head, posted
from bench.hostile.cases_fields import full

_DEPTHS = (255, 256, 257, 1000, 100_000)


def bodies(path: str) -> dict[str, bytes]:
    """By name, around a good request."""
    good = json.dumps(base(path))
    open_, inner = good[:-1], good[1:-1]
    found: dict[str, bytes] = {
        "nothing": b"",
        "a space": b" ",
        "cut short": good[:-1].encode(),
        "cut in a string": good[: good.rindex('"')].encode(),
        "two objects": (good + good).encode(),
        "a comma too many": (open_ + ",}").encode(),
        "a comment": (open_ + ",/* x */\"a\":1}").encode(),
        "single quotes": b"{'a':1}",
        "a list": b"[" + good.encode() + b"]",
        "a string": json.dumps(good).encode(),
        "a number": b"1" * 5000,
        "true": b"true",
        "a form": b"model=x&messages=y",
        "XML": b"<?xml version='1.0'?><!DOCTYPE a [<!ENTITY b SYSTEM 'file:///etc/passwd'>]><a>&b;</a>",
        "NULs": b"\x00" * 1000,
        "a NUL behind": good.encode() + b"\x00",
        "raw control characters": (open_ + ',"a":"\x01\n"}').encode(),
        "invalid UTF-8": open_.encode() + b',"a":"\xff\xfe\x80"}',
        "overlong UTF-8": open_.encode() + b',"a":"\xc0\xaf"}',
        "a surrogate in UTF-8": open_.encode() + b',"a":"\xed\xa0\xbd"}',
        "UTF-8 cut in a character": open_.encode() + b',"a":"\xf0\x9f\x98',
        "UTF-16": good.encode("utf-16"),
        "UTF-32": good.encode("utf-32"),
        "Latin-1": (open_ + ',"a":"\xe9"}').encode("latin-1"),
        "a byte order mark": b"\xef\xbb\xbf" + good.encode(),
        "two byte order marks": b"\xef\xbb\xbf" * 2 + good.encode(),
        "all members twice": f"{{{inner},{inner}}}".encode(),
        "all members twice, null first": f"{{{','.join(f'{json.dumps(k)}:null' for k in json.loads(good))},{inner}}}".encode(),
        "a member 100,000 times": (open_ + ',"a":1' * 100_000 + "}").encode(),
        "100,000 members": (open_ + "".join(f',"k{i}":{i}' for i in range(100_000)) + "}").encode(),
        "a key of a million": (open_ + ',"' + "k" * 10**6 + '":1}').encode(),
        "a string of 8 MiB": (open_ + ',"a":"' + "x" * (8 << 20) + '"}').encode(),
        "a million escapes": (open_ + ',"a":"' + "\\u00e9" * 10**6 + '"}').encode(),
        "a million empty lists": (open_ + ',"a":[' + "[]," * 10**6 + "0]}").encode(),
        "a million numbers": (open_ + ',"a":[' + "1," * 10**6 + "0]}").encode(),
        "numbers of 4000 digits": (open_ + ',"a":[' + ("9" * 4000 + ",") * 500 + "0]}").encode(),
        "a number of a million digits": (open_ + ',"a":' + "7" * 10**6 + "}").encode(),
        "a fraction of a million digits": (open_ + ',"a":0.' + "7" * 10**6 + "}").encode(),
        "an exponent of a million digits": (open_ + ',"a":1e' + "7" * 10**6 + "}").encode(),
        "leading zeros": (open_ + ',"a":0001}').encode(),
        "a plus": (open_ + ',"a":+1}').encode(),
        "hexadecimal": (open_ + ',"a":0x10}').encode(),
        "an escape cut short": (open_ + ',"a":"\\u12"}').encode(),
        "an unknown escape": (open_ + ',"a":"\\x41"}').encode(),
        "white space for ever": b" " * 10**6 + good.encode() + b"\n" * 10**6,
    }  # fmt: skip
    for depth in _DEPTHS:
        found[f"{depth} lists"] = (open_ + ',"a":' + "[" * depth + "]" * depth + "}").encode()
        found[f"{depth} lists, never closed"] = (open_ + ',"a":' + "[" * depth).encode()
        found[f"{depth} objects"] = (open_ + ',"a":' + '{"a":' * depth + "1" + "}" * depth + "}").encode()
    return found


@functools.cache
def texts() -> Sequence[Case]:
    """Every body to every endpoint, and members twice inside messages."""
    found = [
        Case("json", f"{path} {name}", (posted(path, body),), path=path) for path in POSTS for name, body in bodies(path).items()
    ]
    for path in POSTS[:1] + POSTS[2:]:
        text = json.dumps(full(path))
        for member in ("content", "role", "type", "name", "text"):
            for value in ('"other"', "null", "{}", '[{"type":"text","text":"other"}]'):
                doubled = text.replace(f'"{member}":', f'"{member}": {value}, "{member}":')
                found.append(Case("json", f"{path} {member} twice, {value} first", (posted(path, doubled.encode()),), path=path))
                behind = text.replace("}", f', "{member}": {value}}}')
                found.append(
                    Case("json", f"{path} {member} {value} behind everything", (posted(path, behind.encode()),), path=path)
                )
    return found


@functools.cache
def _bombs() -> dict[str, bytes]:
    """More than a body may have once it is unpacked."""
    padded = json.dumps({**base(CHAT), "a": " " * (80 << 20)}).encode()
    return {"gzip": gzip.compress(padded, 6), "deflate": zlib.compress(padded, 6)}


@functools.cache
def encodings() -> Sequence[Case]:
    """Types and encodings of the body that are none, are wrong, or blow up."""
    good = json.dumps(base(CHAT)).encode()
    bodies: list[tuple[str, dict[str, str], bytes]] = [
        ("gzip", {"Content-Encoding": "gzip"}, gzip.compress(good)),
        ("deflate", {"Content-Encoding": "deflate"}, zlib.compress(good)),
        ("gzip that is none", {"Content-Encoding": "gzip"}, good),
        ("deflate that is none", {"Content-Encoding": "deflate"}, good),
        ("gzip cut short", {"Content-Encoding": "gzip"}, gzip.compress(good)[:-9]),
        ("gzip and more", {"Content-Encoding": "gzip"}, gzip.compress(good) + b"x" * 100),
        ("two members of gzip", {"Content-Encoding": "gzip"}, gzip.compress(good) + gzip.compress(good)),
        ("gzip twice", {"Content-Encoding": "gzip, gzip"}, gzip.compress(gzip.compress(good))),
        ("br", {"Content-Encoding": "br"}, good),
        ("zstd", {"Content-Encoding": "zstd"}, b"\x28\xb5\x2f\xfd" + good),
        ("an unknown encoding", {"Content-Encoding": "rot13"}, good),
        ("identity", {"Content-Encoding": "identity"}, good),
        ("no type", {"Content-Type": ""}, good),
        ("a form", {"Content-Type": "application/x-www-form-urlencoded"}, good),
        ("a multipart", {"Content-Type": "multipart/form-data; boundary=" + "x" * 1000}, b"--x\r\n\r\n" + good),
        ("an unknown character set", {"Content-Type": "application/json; charset=klingon"}, good),
        ("UTF-16 by its type", {"Content-Type": "application/json; charset=utf-16"}, good.decode().encode("utf-16")),
        ("a type of 60,000", {"Content-Type": "application/json; a=" + "x" * 60_000}, good),
        ("a trailer announced", {"Trailer": "Content-Length"}, good),
        ("an event stream wanted", {"Accept": "text/event-stream"}, good),
        ("nothing wanted", {"Accept": "image/png;q=1, */*;q=0", "Accept-Encoding": "*;q=0"}, good),
    ]  # fmt: skip
    found = [Case("encoding", name, (posted(CHAT, body, headers),), path=CHAT) for name, headers, body in bodies]
    for name, body in _bombs().items():
        found.append(Case("encoding", f"a bomb of {name}", (posted(CHAT, body, {"Content-Encoding": name}),), path=CHAT))
    declared = head("POST", CHAT, {"Content-Type": "application/json", "Content-Length": str(65 << 20)})
    found.append(Case("encoding", "65 MiB announced", (declared,), path=CHAT))
    return found
