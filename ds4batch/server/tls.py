"""TLS of the listening sockets: the certificate and its key, and how they are replaced while the server runs."""

from __future__ import annotations

import logging
import ssl

from ds4batch.server.files import stamp

log = logging.getLogger(__name__)

_REASONS = {
    "KEY_VALUES_MISMATCH": "the certificate and the key do not belong together",
    "EE_KEY_TOO_SMALL": "the key is too short",
    "CA_MD_TOO_WEAK": "its signature is too weak",
}
_NO_REASON = "no usable PEM block of the expected kind"


class TlsError(Exception):
    """A certificate or a key cannot be used; the message names the file."""


class _Encrypted(Exception):
    """OpenSSL asked for a password."""


class Certificate:
    """A chain and its private key, PEM files, and the context of the listening sockets, which takes what they become."""

    def __init__(self, chain: str, key: str) -> None:
        """TLS 1.2 and later. Raises TlsError."""
        self._files = (chain, key)
        self._seen = stamp(*self._files)
        self.context = _context(*self._files)

    def poll(self) -> None:
        """Give new connections what the files hold now. Until both fit together the old pair stays; the log says so."""
        seen = stamp(*self._files)
        if seen == self._seen:
            return
        self._seen = seen
        try:
            _context(*self._files)  # first, because a context keeps the half that was loaded before an error
            _load(self.context, *self._files)
        except TlsError as error:
            log.error("the certificate stays as it was: %s", error)
        else:
            log.info("the certificate of %s is used now", self._files[0])


def _context(chain: str, key: str) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    _load(context, chain, key)
    return context


def _load(context: ssl.SSLContext, chain: str, key: str) -> None:
    for path in (chain, key):  # OpenSSL does not say which of the two it could not open
        try:
            with open(path, "rb") as file:
                file.read(1)
        except OSError as error:
            raise TlsError(f"{path}: {error.strerror}") from None
    try:
        context.load_cert_chain(chain, key, password=_no_password)
    except _Encrypted:
        raise TlsError(f"{key}: the key is encrypted, and nobody is there to type its password") from None
    except ssl.SSLError as error:
        raise TlsError(f"{_at_fault(chain, key)}: {_REASONS.get(error.reason, error.reason) or _NO_REASON}") from None


def _at_fault(chain: str, key: str) -> str:
    """The file that the message is about: the certificate where it cannot be used by itself, else the key."""
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_verify_locations(chain)
    except ssl.SSLError:
        return chain
    return key


def _no_password() -> str:
    raise _Encrypted
