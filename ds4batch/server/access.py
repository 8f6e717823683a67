"""Who may ask for what: the key of a request, the scope of a route, and the refusals.

A key comes as `Authorization: Bearer KEY` or as `x-api-key: KEY`. Pages that a browser shows also take it as the password of HTTP
Basic, under any user name; the APIs do not: a browser sends a password that it has kept along with the requests that other sites
make it send. Nothing here is logged, and no refusal repeats what was presented.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Mapping

from ds4batch.server.errors import ApiError
from ds4batch.server.keys import ANYBODY, STRANGER, KeyInfo, Keys
from ds4batch.server.metrics import Metrics

OPEN = frozenset({"/health"})
ADMIN = frozenset({"/", "/status.json", "/status/stream", "/metrics"})
_REALM = 'realm="ds4batch"'
_LONGEST_BASIC = 4096  # characters


class Refused(ApiError):
    """401 or 403. `reason` is one of metric_series.LOGIN_REFUSALS."""

    def __init__(self, status: int, message: str, reason: str, *, code: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(status, message, code=code, headers=headers)
        self.reason = reason


class Access:
    """Admits requests. Without keys everybody may do everything."""

    def __init__(self, keys: Keys | None, metrics: Metrics) -> None:
        self._keys = keys
        self._metrics = metrics

    def admit(self, headers: Mapping[str, str], path: str) -> KeyInfo:
        """Whose request it is; STRANGER's on an open route without a key that holds. Raises Refused."""
        if self._keys is None:
            return ANYBODY
        presented = list(_presented(headers, basic=path in ADMIN))
        found = next((info for info in map(self._keys.find, presented) if info is not None), None)
        if path in OPEN:
            return found or STRANGER
        if found is None:
            raise self._refused(_not_let_in(bool(presented), path))
        if path in ADMIN and found.scope != "admin":
            raise self._refused(Refused(403, "this needs a key of admin scope", "scope", code="insufficient_permissions"))
        return found

    def _refused(self, error: Refused) -> Refused:
        self._metrics.login_refused(error.reason)
        return error


def _not_let_in(presented: bool, path: str) -> Refused:
    bearer = f'Bearer {_REALM}, error="invalid_token"' if presented else f"Bearer {_REALM}"
    challenge = f'Basic {_REALM}, charset="UTF-8"' if path in ADMIN else bearer
    headers = {"WWW-Authenticate": challenge, "Cache-Control": "no-store"}
    if presented:
        return Refused(401, "the API key is not known to this server", "unknown", code="invalid_api_key", headers=headers)
    how = "send it as `Authorization: Bearer KEY` or as `x-api-key: KEY`"
    return Refused(401, f"this server needs an API key: {how}", "missing", code="invalid_api_key", headers=headers)


def _presented(headers: Mapping[str, str], *, basic: bool) -> Iterator[str]:
    """The keys that a request brings. A client may be set up to send two, one of them another service's."""
    scheme, _, rest = headers.get("Authorization", "").strip().partition(" ")
    if scheme.lower() == "bearer" and rest.strip():
        yield rest.strip()
    elif basic and scheme.lower() == "basic" and len(rest) <= _LONGEST_BASIC:
        try:
            password = base64.b64decode(rest.strip(), validate=True).decode().partition(":")[2]
        except (binascii.Error, ValueError):
            password = ""
        if password:
            yield password
    if given := headers.get("X-Api-Key", "").strip():
        yield given
