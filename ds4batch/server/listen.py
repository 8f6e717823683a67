"""The listening sockets. Bound before anything slow happens, so that a port in use is told at once."""

from __future__ import annotations

import socket

BACKLOG = 128
SEND_BUFFER_BYTES = 128 << 10
"""The kernel's share of a connection's send buffer. Small: a client that stopped reading is noticed only when it is full."""


class ListenError(RuntimeError):
    """The address cannot be bound; the message names it."""


def listen(host: str, port: int) -> list[socket.socket]:
    """Bind every address `host` stands for; port 0 takes one free port for all of them. Raises ListenError."""
    name = "127.0.0.1" if host == "localhost" else host
    try:
        found = socket.getaddrinfo(name or "0.0.0.0", port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ListenError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
    sockets: list[socket.socket] = []
    for family, kind, proto, _, address in dict.fromkeys(found):
        sock = socket.socket(family, kind, proto)
        sockets.append(sock)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)  # accepted sockets inherit it
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            sock.bind((address[0], port, *address[2:]))
            sock.listen(BACKLOG)
            sock.setblocking(False)
        except OSError as error:
            for opened in sockets:
                opened.close()
            raise ListenError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
        port = sock.getsockname()[1]
    return sockets
