"""Who may use the console in a browser: the person who was told the token, from a page of ours.

A browser runs pages of strangers too. Three checks keep them out: the address bar's host must be ours, which
ends DNS rebinding; a WebSocket must come from a page of ours (Origin), which ends cross-site hijacking; and the
browser must hold a session's cookie, got once for a token that only the terminal showed.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Mapping

TOKEN_BYTES = 32


class Door:
    """The checks of one server on `port` of the loopback. Nothing here is logged or told to a stranger."""

    def __init__(self, port: int) -> None:
        self.hosts = (f"127.0.0.1:{port}", f"localhost:{port}")
        self.cookie = f"memconsole-{port}"
        """Cookies know no ports: the name keeps two servers apart."""
        self._token: str | None = secrets.token_urlsafe(TOKEN_BYTES)
        self._session = secrets.token_urlsafe(TOKEN_BYTES)

    @property
    def address(self) -> str:
        """What to open, once."""
        return f"http://{self.hosts[0]}/?token={self._token or 'spent'}"

    def host_is_ours(self, headers: Mapping[str, str]) -> bool:
        return headers.get("Host", "") in self.hosts

    def page_is_ours(self, headers: Mapping[str, str]) -> bool:
        """Whether a WebSocket is opened by a page of this very address."""
        return headers.get("Origin", "") == f"http://{headers.get('Host', '')}"

    def admit(self, token: str) -> str | None:
        """The session for the token, the first time it is shown; None ever after and for any other."""
        if self._token is None or not _same(token, self._token):
            return None
        self._token = None
        return self._session

    def knows(self, session: str) -> bool:
        """Whether this is the session that the token opened."""
        return self._token is None and _same(session, self._session)


def _same(given: str, wanted: str) -> bool:
    """Compared in a time that tells nothing."""
    return hmac.compare_digest(given.encode(), wanted.encode())
