"""A headless Chromium driven by its DevTools protocol, with what its terminal received on an emulated screen."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import re
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pyte
from terminal import PRIVATE, only_known

RECORD = """
window.received = [];
const Real = window.WebSocket;
window.WebSocket = class extends Real {
  constructor(...given) {
    super(...given);
    const query = new URL(given[0]).searchParams;
    window.size = [Number(query.get("width")), Number(query.get("height"))];
    this.addEventListener("message", (e) => {
      if (typeof e.data !== "string") {
        let text = "";
        for (const byte of new Uint8Array(e.data)) text += String.fromCharCode(byte);
        window.received.push(btoa(text));
      }
    });
  }
  send(data) {
    const [kind, value] = JSON.parse(data);
    if (kind === "resize") window.size = [value.width, value.height];
    super.send(data);
  }
};
"""
"""Keeps the bytes that the page's terminal is given, and its size."""


def chromium() -> str | None:
    """The browser's command, if this machine has one."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    return next((path for name in names if (path := shutil.which(name))), None)


class Page:
    """One tab."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self.screen = pyte.Screen(80, 24)
        self._stream = pyte.ByteStream(self.screen)
        self.raw = b""

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One DevTools command."""
        number = next(self._numbers)
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        while True:
            answer = json.loads((await asyncio.wait_for(self._socket.receive(), 30)).data)
            if answer.get("id") == number:
                assert "error" not in answer, answer
                found: dict[str, Any] = answer["result"]
                return found

    async def evaluate(self, script: str) -> Any:
        result = await self.call("Runtime.evaluate", expression=script, returnByValue=True)
        return result["result"].get("value")

    async def open(self, address: str) -> None:
        """Go there, recording what the terminal receives."""
        await self.call("Page.enable")
        await self.call("Page.addScriptToEvaluateOnNewDocument", source=RECORD)
        await self.call("Page.navigate", url=address)

    async def text(self) -> str:
        """The terminal's screen."""
        columns, rows = await self.evaluate("window.size") or (80, 24)
        if (self.screen.columns, self.screen.lines) != (columns, rows):
            self.screen.resize(rows, columns)
        for piece in await self.evaluate("window.received ? window.received.splice(0) : []") or []:
            data = base64.b64decode(piece)
            self.raw += data
            self._stream.feed(PRIVATE.sub(only_known, data))
        return "\n".join(line.rstrip() for line in self.screen.display)

    async def wait_for(self, pattern: str, seconds: float = 60.0) -> re.Match[str]:
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while not (match := re.search(pattern, await self.text())):
            assert loop.time() < end, f"{pattern!r} not seen:\n{await self.text()}"
            await asyncio.sleep(0.1)
        return match

    async def until(self, script: str, seconds: float = 30.0) -> Any:
        """Wait until a script is true there; its value."""
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while not (value := await self.evaluate(script)):
            assert loop.time() < end, f"never true: {script}"
            await asyncio.sleep(0.1)
        return value

    async def press(self, text: str) -> None:
        """Type characters into the page."""
        for character in text:
            await self.call("Input.dispatchKeyEvent", type="keyDown", text=character, key=character)
            await self.call("Input.dispatchKeyEvent", type="keyUp", key=character)

    async def picture(self, path: Path) -> bytes:
        data = base64.b64decode((await self.call("Page.captureScreenshot"))["data"])
        path.write_bytes(data)
        return data


@asynccontextmanager
async def browsing(folder: Path, width: int = 1000, height: int = 620) -> AsyncIterator[Page]:
    """A fresh profile and one empty tab."""
    command = chromium()
    assert command is not None
    process = await asyncio.create_subprocess_exec(
        command, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
        "--no-first-run", "--disable-background-networking", "--remote-debugging-port=0",
        f"--user-data-dir={folder / 'profile'}", f"--window-size={width},{height}", "about:blank",
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        assert process.stderr is not None
        port = ""
        while not port:
            line = (await asyncio.wait_for(process.stderr.readline(), 60)).decode()
            assert line, "the browser did not start"
            found = re.search(r"DevTools listening on ws://[^:]+:(\d+)/", line)
            port = found[1] if found else ""
        drain = asyncio.create_task(process.stderr.read())
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                tabs = [tab for tab in await answer.json() if tab["type"] == "page"]
            async with session.ws_connect(
                tabs[0]["webSocketDebuggerUrl"], max_msg_size=1 << 26
            ) as socket:
                yield Page(socket)
        drain.cancel()
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
