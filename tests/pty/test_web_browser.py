"""`memconsole web` in a real browser: the console is drawn, takes keys, and changes nothing unless asked."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("aiohttp")
pytest.importorskip("textual_serve")

from browser import browsing, chromium

pytestmark = pytest.mark.skipif(chromium() is None, reason="no Chromium on this machine")

PNG_OF_AN_EMPTY_PAGE = 15_000
"""Bytes; a drawn console compresses to several times that."""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SSH_", "NO_COLOR"))}
    return kept | {"XDG_STATE_HOME": str(tmp_path / "state"), "OMP_NUM_THREADS": "1"}


@pytest.fixture
def serve(environment: dict[str, str]) -> Iterator[object]:
    servers: list[subprocess.Popen[str]] = []

    def start(*options: str) -> str:
        argv = [sys.executable, "-m", "memconsole", "web", *options]
        servers.append(
            subprocess.Popen(
                argv, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
        )
        assert servers[-1].stdout is not None
        return servers[-1].stdout.readline().strip()

    yield start
    for server in servers:
        server.terminate()
        assert server.wait(20) == 0


async def test_the_console_is_drawn_takes_keys_and_launches_nothing(
    serve, environment: dict[str, str], tmp_path: Path
) -> None:  # type: ignore[no-untyped-def]
    address = serve()
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/[\w-]{12}/\?token=[\w-]{43}", address)
    async with browsing(tmp_path) as page:
        await page.open(address)
        await page.wait_for("memconsole")
        await page.wait_for("optimizations|fits, ")
        await page.wait_for("read only")
        assert await page.evaluate("location.href") == re.sub(r"\?.*", "", address)
        assert await page.evaluate("document.cookie") == "", "scripts cannot read the session"
        picture = await page.picture(tmp_path / "page.png")
        assert len(picture) > PNG_OF_AN_EMPTY_PAGE
        await page.press("l")
        await page.press("g")
        await page.wait_for("memconsole  devices")
        await page.press("q")
        await page.until("document.body.classList.contains('-closed')")
        shown = "getComputedStyle(document.getElementById('ended')).display"
        assert await page.evaluate(shown) == "block"
    assert not list(Path(environment["XDG_STATE_HOME"]).glob("memconsole/runs/2*"))


async def test_a_used_address_opens_nothing_in_another_browser(serve, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    address = serve()
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    async with browsing(tmp_path / "a") as first:
        await first.open(address)
        await first.wait_for("memconsole")
        async with browsing(tmp_path / "b") as second:
            await second.open(address)
            await second.until("document.body && document.body.innerText.includes('has been used')")
            assert await second.evaluate("document.getElementById('terminal')") is None


async def test_a_page_of_others_cannot_reach_the_console_of_this_browser(
    serve, tmp_path: Path
) -> None:  # type: ignore[no-untyped-def]
    """The browser holds the cookie, and still a stranger's page gets no terminal."""
    address = serve()
    host, folder = address.split("/")[2:4]
    async with browsing(tmp_path) as page:
        await page.open(address)
        await page.wait_for("memconsole")
        await page.call("Page.navigate", url="data:text/html,<p>a stranger</p>")
        await page.until("document.body && document.body.innerText.includes('a stranger')")
        await page.evaluate(
            f"window.outcome = ''; const s = new WebSocket('ws://{host}/{folder}/ws');"
            "s.onopen = () => window.outcome = 'open'; s.onerror = () => window.outcome = 'refused';"
        )
        assert await page.until("window.outcome") == "refused"
