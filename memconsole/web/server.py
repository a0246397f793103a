"""Serves the console to a browser on the loopback: a page, its scripts, one WebSocket per tab.

The page's terminal and its wire format come with textual-serve (xterm.js). The program it shows is
the ordinary `memconsole` on a pseudo-terminal. Messages from the page are JSON lists: ``["stdin",
text]``, ``["resize", {"width", "height"}]``, ``["ping", text]``. The console's output goes back as
bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from aiohttp import WSMsgType, web
from aiohttp.http_exceptions import HttpProcessingError

from memconsole.errors import UserError
from memconsole.extras import to_install
from memconsole.sanitize import clean_line
from memconsole.web.access import Door
from memconsole.web.shell import Shell

MOST_TABS = 4
MESSAGE_BYTES = 64 << 10
"""A page sends only keys and sizes; a larger message is refused."""
ASSETS = {
    "terminal.js": ("js/textual.js", "text/javascript"),
    "terminal.css": ("css/xterm.css", "text/css"),
    "RobotoMono.ttf": ("fonts/RobotoMono-VariableFont_wght.ttf", "font/ttf"),
}
"""The textual-serve files the page needs, by the name they are served under."""


class WebConsole:
    """One server. `argv` is the console's command; each tab starts it once."""

    def __init__(self, argv: Sequence[str], port: int = 0) -> None:
        """Binds the port at once. Raises `UserError` if the port is taken."""
        self.argv = tuple(argv)
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self.socket.bind(("127.0.0.1", port))
        except OSError as error:
            self.socket.close()
            raise UserError(f"port {port} of 127.0.0.1: {error.strerror}") from None
        self.port: int = self.socket.getsockname()[1]
        self.door = Door(self.port)
        self._tabs: set[web.WebSocketResponse] = set()
        self._assets = {name: _asset(path) for name, (path, _) in ASSETS.items()}
        here = files("memconsole.web")
        self._page, self._style, self._script = (
            here.joinpath(f"page.{kind}").read_text(encoding="utf-8")
            for kind in ("html", "css", "js")
        )

    def application(self) -> web.Application:
        app = web.Application(middlewares=[self._guard()], client_max_size=MESSAGE_BYTES)
        app.on_shutdown.append(self._close_tabs)
        here = self.door.folder
        app.add_routes(
            [
                web.get(f"{here}/", self._index, allow_head=False),  # the token works once
                web.get(f"{here}/page.css", self._page_style),
                web.get(f"{here}/page.js", self._page_script),
                web.get(f"{here}/assets/{{name}}", self._serve_asset),
                web.get(f"{here}/ws", self._terminal),
            ]
        )
        return app

    def run(self, ready: Callable[[str], object]) -> None:
        """Run `serve` until SIGINT, SIGTERM or SIGHUP."""

        async def until_told() -> None:
            serving = asyncio.ensure_future(self.serve(ready))
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                asyncio.get_running_loop().add_signal_handler(number, serving.cancel)
            with contextlib.suppress(asyncio.CancelledError):
                await serving

        asyncio.run(until_told())

    async def serve(self, ready: Callable[[str], object]) -> None:
        """Serve until cancelled. `ready` is called with the address, which contains the token."""
        runner = web.AppRunner(
            self.application(), access_log=None, logger=_log(), shutdown_timeout=5.0
        )
        await runner.setup()
        try:
            await web.SockSite(runner, self.socket).start()
            ready(self.door.address)
            await asyncio.Event().wait()
        finally:
            await runner.cleanup()

    # Access

    def _guard(self) -> Any:
        @web.middleware
        async def guard(request: web.Request, handler: Any) -> web.StreamResponse:
            if not self.door.host_is_ours(request.headers):
                raise web.HTTPMisdirectedRequest(
                    text="wrong host: this console is served at another address\n"
                )
            if request.path != f"{self.door.folder}/" and not self._known(request):
                raise web.HTTPForbidden(text="open the address that memconsole web printed\n")
            response: web.StreamResponse = await handler(request)
            if not response.prepared:
                self._harden(request, response)
            return response

        return guard

    def _known(self, request: web.Request) -> bool:
        return self.door.knows(request.cookies.get(self.door.cookie, ""))

    def _harden(self, request: web.Request, response: web.StreamResponse) -> None:
        """Forbid other sites in the page, and the page in frames of other sites."""
        response.headers.update(
            {
                "Content-Security-Policy": "default-src 'none'; script-src 'self'; "
                "style-src 'self' 'unsafe-inline'; font-src 'self'; img-src 'self' data:; "
                f"connect-src ws://{request.host}; base-uri 'none'; form-action 'none'; "
                "frame-ancestors 'none'",
                "Cross-Origin-Opener-Policy": "same-origin",
                "Cross-Origin-Resource-Policy": "same-origin",
                "Referrer-Policy": "no-referrer",
                "X-Content-Type-Options": "nosniff",
                "Cache-Control": "no-store",
            }
        )

    # Pages

    async def _index(self, request: web.Request) -> web.StreamResponse:
        """The page. A request with the token gets a session cookie and a redirect."""
        token = request.query.get("token")
        if token is not None:
            session = self.door.admit(token)
            if session is None and not self._known(request):
                raise web.HTTPForbidden(
                    text="this address has been used; start memconsole web again\n"
                )
            moved = web.Response(status=303, headers={"Location": request.path})
            if session is not None:
                moved.set_cookie(
                    self.door.cookie, session, httponly=True, samesite="Strict", path=request.path
                )
            return moved
        if not self._known(request):
            raise web.HTTPForbidden(text="open the address that memconsole web printed\n")
        page = self._page.replace(
            "{{address}}", escape(f"ws://{request.host}{request.path}ws", quote=True)
        )
        return web.Response(text=page, content_type="text/html")

    async def _page_style(self, request: web.Request) -> web.Response:
        return web.Response(text=self._style, content_type="text/css")

    async def _page_script(self, request: web.Request) -> web.Response:
        return web.Response(text=self._script, content_type="text/javascript")

    async def _serve_asset(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name not in self._assets:
            raise web.HTTPNotFound
        return web.Response(body=self._assets[name], content_type=ASSETS[name][1])

    # The terminal

    async def _terminal(self, request: web.Request) -> web.StreamResponse:
        """Run a console for one tab until the tab closes."""
        if not self.door.page_is_ours(request.headers):
            raise web.HTTPForbidden(text="not from a page of this console\n")
        tab = web.WebSocketResponse(heartbeat=20.0, max_msg_size=MESSAGE_BYTES)
        if len(self._tabs) >= MOST_TABS:
            await tab.prepare(request)
            await tab.send_bytes(f"{MOST_TABS} tabs are open already: close one first\r\n".encode())
            await tab.close()
            return tab
        self._tabs.add(tab)
        try:
            await tab.prepare(request)
            size = (_number(request.query.get(k), n) for k, n in (("width", 80), ("height", 24)))
            shell = Shell.open(self.argv, *size)
            shown = asyncio.create_task(_show(shell, tab))
            try:
                await _type(shell, tab)
            finally:
                await shell.close()
                await shown
                shell.forget()
        finally:
            self._tabs.discard(tab)
        return tab

    async def _close_tabs(self, app: web.Application) -> None:
        """Close every tab, and so its console, when the server stops."""
        for tab in tuple(self._tabs):
            await tab.close()


class _OneLine(logging.Handler):
    """Prints a failure of this server as one line, and nothing about malformed requests: anyone
    on this machine can send them."""

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if not isinstance(error, HttpProcessingError):
            words = record.getMessage() if error is None else f"{type(error).__name__}: {error}"
            print(f"memconsole web: {clean_line(words, 300)}", file=sys.stderr)


def _log() -> logging.Logger:
    found = logging.getLogger("memconsole.web")
    found.propagate = False
    found.handlers = [_OneLine()]
    return found


async def _show(shell: Shell, tab: web.WebSocketResponse) -> None:
    """Send the console's output, no faster than the page takes it, until either ends."""
    while content := await shell.read():
        with contextlib.suppress(ConnectionError):
            await tab.send_bytes(content)
    await tab.close()


async def _type(shell: Shell, tab: web.WebSocketResponse) -> None:
    """Take keys and sizes from the page until it closes. Malformed messages are ignored."""
    async for message in tab:
        if message.type != WSMsgType.TEXT:
            continue
        try:
            kind, value = json.loads(message.data)
            if kind == "stdin":
                await shell.write(str(value).encode("utf-8", "replace"))
            elif kind == "resize":
                shell.resize(int(value["width"]), int(value["height"]))
            elif kind == "ping":
                await tab.send_json(["pong", str(value)[:40]])
        except (ValueError, TypeError, KeyError, OverflowError):
            continue
        except OSError:
            return


def _number(text: str | None, default: int) -> int:
    return int(text) if text and text.isascii() and text.isdecimal() and len(text) < 5 else default


def _asset(path: str) -> bytes:
    """The content of a textual-serve file. Raises `UserError` if textual-serve is not installed."""
    try:
        return Path(str(files("textual_serve").joinpath("static", path))).read_bytes()
    except (ModuleNotFoundError, OSError):
        raise UserError(f"to serve the console, {to_install('web')}") from None
