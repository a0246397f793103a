"""Admits only the browser of the person who was given the token.

A browser also runs pages from other sites. Three checks keep them out. The Host header must be this
server's, which prevents DNS rebinding. A WebSocket must be opened by a page of this server
(Origin), which prevents cross-site hijacking. And the browser must hold the session cookie, which
it gets once in exchange for a token that only the terminal showed.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Mapping

TOKEN_BYTES = 32


class Door:
    """The access checks of one server on `port` of the loopback interface. It logs nothing."""

    def __init__(self, port: int) -> None:
        self.hosts = (f"127.0.0.1:{port}", f"localhost:{port}")
        self.cookie = f"memconsole-{port}"
        """Cookies ignore ports, so the name contains the port to keep two servers apart."""
        self.folder = f"/{secrets.token_urlsafe(9)}"
        """The path under which everything is served. The cookie is sent to this path only, so that the browser does not show
        it to servers on other ports."""
        self._token: str | None = secrets.token_urlsafe(TOKEN_BYTES)
        self._session = secrets.token_urlsafe(TOKEN_BYTES)

    @property
    def address(self) -> str:
        """The address to open; it works once."""
        return f"http://{self.hosts[0]}{self.folder}/?token={self._token or 'spent'}"

    def host_is_ours(self, headers: Mapping[str, str]) -> bool:
        return headers.get("Host", "") in self.hosts

    def page_is_ours(self, headers: Mapping[str, str]) -> bool:
        """Whether a WebSocket is opened by a page of this server."""
        return headers.get("Origin", "") == f"http://{headers.get('Host', '')}"

    def admit(self, token: str) -> str | None:
        """The session for the token on its first use; None for another token or a later use."""
        if self._token is None or not _same(token, self._token):
            return None
        self._token = None
        return self._session

    def knows(self, session: str) -> bool:
        """Whether `session` is the one that the token opened."""
        return self._token is None and _same(session, self._session)


def _same(given: str, wanted: str) -> bool:
    """Compare in constant time. What was given may hold bytes that are no text."""
    return hmac.compare_digest(given.encode("utf-8", "surrogatepass"), wanted.encode())
