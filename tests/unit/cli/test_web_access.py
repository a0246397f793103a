"""Who gets at the console in a browser, against a real server: token, cookie, Host, Origin, and no more."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http.cookies import SimpleCookie

import pytest

aiohttp = pytest.importorskip("aiohttp")
pytest.importorskip("textual_serve")

from memconsole.web.access import Door
from memconsole.web.server import MOST_TABS, WebConsole

ECHO = (
    "import os, sys, tty; tty.setraw(0)\n"
    "print('size', *os.get_terminal_size(), flush=True)\n"
    "while key := os.read(0, 100):\n"
    "    if key == b'q': break\n"
    "    os.write(1, b'<' + key + b'>')\n"
)


class Browser:
    """A client that keeps cookies as a browser does and sends the headers it is told to."""

    def __init__(self, server: WebConsole, session: aiohttp.ClientSession) -> None:
        self.server, self.session = server, session
        self.base = f"http://127.0.0.1:{server.port}"
        self.folder = server.door.folder
        self.cookies: dict[str, str] = {}

    async def get(self, path: str, **headers: str) -> tuple[int, str, dict[str, str]]:
        given = {"Cookie": "; ".join(f"{k}={v}" for k, v in self.cookies.items()), **headers}
        """Answer of a path; one that begins with ~ is below the folder."""
        path = path.replace("~", self.folder, 1) if path.startswith("~") else path
        async with self.session.get(
            self.base + path, headers=given, allow_redirects=False
        ) as answer:
            for line in answer.headers.getall("Set-Cookie", []):
                self.cookies |= {k: m.value for k, m in SimpleCookie(line).items()}
            return answer.status, await answer.text(errors="replace"), dict(answer.headers)

    async def enter(self) -> None:
        status, _, _ = await self.get(self.server.door.address.removeprefix(self.base))
        assert status == 303

    def tab(self, origin: str | None = None, **more: str):  # type: ignore[no-untyped-def]
        headers = {"Cookie": "; ".join(f"{k}={v}" for k, v in self.cookies.items()), **more}
        headers["Origin"] = self.base if origin is None else origin
        return self.session.ws_connect(
            f"{self.base}{self.folder}/ws?width=90&height=30", headers=headers
        )


@asynccontextmanager
async def served(code: str = ECHO) -> AsyncIterator[Browser]:
    server = WebConsole([sys.executable, "-c", code])
    ready = asyncio.Event()
    serving = asyncio.create_task(server.serve(lambda address: ready.set()))
    await asyncio.wait_for(ready.wait(), 10)
    async with aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar()) as session:
        yield Browser(server, session)
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)


async def heard(tab: aiohttp.ClientWebSocketResponse, until: bytes) -> bytes:
    """What the page receives, until it holds `until`."""
    seen = b""
    while until not in seen:
        message = await asyncio.wait_for(tab.receive(), 20)
        assert message.type == aiohttp.WSMsgType.BINARY, (message, seen)
        seen += message.data
    return seen


async def test_the_server_listens_on_the_loopback_only() -> None:
    async with served() as browser:
        assert browser.server.socket.getsockname()[0] == "127.0.0.1"


async def test_asking_for_headers_alone_does_not_use_the_token_up() -> None:
    async with served() as browser:
        async with browser.session.head(browser.server.door.address) as answer:
            assert answer.status == 405
        await browser.enter()


async def test_the_token_opens_once_and_its_cookie_afterwards() -> None:
    async with served() as browser:
        address = browser.server.door.address.removeprefix(browser.base)
        assert (await browser.get("~/"))[0] == 403
        assert (await browser.get("~/?token=guess"))[0] == 403
        assert (await browser.get("/" + address.partition("/?")[2]))[0] == 403
        status, _, headers = await browser.get(address)
        assert (status, headers["Location"]) == (303, f"{browser.folder}/")
        cookie = headers["Set-Cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=Strict" in cookie
        assert f"Path={browser.folder}/" in cookie, "servers on other ports do not get it"
        assert address.partition("=")[2] not in cookie
        status, page, headers = await browser.get("~/")
        assert status == 200
        assert "textual-terminal" in page
        assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
        stranger = Browser(browser.server, browser.session)
        assert (await stranger.get(address))[0] == 403, "the token is spent"
        assert (await stranger.get("~/"))[0] == 403


async def test_every_path_is_shut_without_the_cookie() -> None:
    async with served() as browser:
        for path in (
            "~/ws",
            "~/page.css",
            "~/page.js",
            "~/assets/terminal.js",
            "~/assets/../server.py",
            "~/x",
            "/",
            "/x",
        ):
            assert (await browser.get(path))[0] == 403, path


async def test_only_three_assets_are_served() -> None:
    async with served() as browser:
        await browser.enter()
        for path in ("~/assets/terminal.js", "~/assets/terminal.css", "~/page.css", "~/page.js"):
            assert (await browser.get(path))[0] == 200, path
        for path in ("~/assets/page.html", "~/assets/..%2fserver.py", "~/assets/", "/etc/passwd"):
            assert (await browser.get(path))[0] == 404, path


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1", "127.0.0.1:1", "localhost", "127.0.0.1.evil.example", ""]
)
async def test_another_host_name_is_turned_away_even_with_the_cookie(host: str) -> None:
    """DNS rebinding: a stranger's name that leads to the loopback."""
    async with served() as browser:
        await browser.enter()
        assert (await browser.get("~/", Host=host))[0] == 421
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await browser.tab(Host=host)
        assert refused.value.status == 421


@pytest.mark.parametrize(
    "origin", ["", "null", "http://evil.example", "https://127.0.0.1", "http://localhost"]
)
async def test_a_page_of_others_opens_no_terminal_even_with_the_cookie(origin: str) -> None:
    async with served() as browser:
        await browser.enter()
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await browser.tab(origin)
        assert refused.value.status == 403


async def test_a_tab_types_sizes_and_ends_with_its_console() -> None:
    async with served() as browser:
        await browser.enter()
        async with browser.tab() as tab:
            assert b"size 90 30" in await heard(tab, b"\n")
            await tab.send_str(json.dumps(["stdin", "é\x1b[A"]))
            await heard(tab, "<é\x1b[A>".encode())
            for nonsense in (
                "{",
                "[]",
                "[1]",
                '["resize", 3]',
                '["resize", {"width": "x"}]',
                '["?", 1]',
            ):
                await tab.send_str(nonsense)
            await tab.send_str(json.dumps(["resize", {"width": 1 << 40, "height": -5}]))
            await tab.send_str(json.dumps(["stdin", "z"]))
            await heard(tab, b"<z>")
            await tab.send_str(json.dumps(["stdin", "q"]))
            while (
                message := await asyncio.wait_for(tab.receive(), 20)
            ).type == aiohttp.WSMsgType.BINARY:
                pass
            assert message.type in (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSED)


async def test_closing_the_tab_ends_its_console(tmp_path) -> None:  # type: ignore[no-untyped-def]
    mark = tmp_path / "pid"
    code = f"import os, time; open({str(mark)!r}, 'w').write(str(os.getpid())); print('up', flush=True); time.sleep(600)"
    async with served(code) as browser:
        await browser.enter()
        async with browser.tab() as tab:
            await heard(tab, b"up")
        pid = int(mark.read_text())
        for _ in range(100):
            try:
                import os

                os.kill(pid, 0)
            except ProcessLookupError:
                return
            await asyncio.sleep(0.1)
        pytest.fail("the console goes on without its tab")


async def test_one_tab_too_many_is_told_so() -> None:
    async with served() as browser:
        await browser.enter()
        tabs = [await browser.tab() for _ in range(MOST_TABS)]
        async with browser.tab() as tab:
            await heard(tab, f"{MOST_TABS} tabs are open already".encode())
            assert (await asyncio.wait_for(tab.receive(), 20)).type == aiohttp.WSMsgType.CLOSE
        for tab in tabs:
            await tab.close()


def test_no_part_of_a_door_opens_before_its_token() -> None:
    door = Door(8000)
    assert not door.knows("")
    assert not door.knows(door._session), "no token was shown yet"
    assert door.admit("") is None
    token = door.address.partition("token=")[2]
    session = door.admit(token)
    assert session is not None
    assert session != token
    assert door.knows(session)
    assert not door.knows(token)
    assert token not in door.address
