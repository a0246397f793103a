"""Control characters that are typed, files of the current folder, and requests that are no HTTP."""

from __future__ import annotations

import ast
import asyncio
import os
import sys
from pathlib import Path

import pytest

import memconsole
from memconsole.cli import main as command_line
from memconsole.devices.probe import read_once

ESCAPES = "bad\x1b[31m\x1b]0;title\x07\x9b2J\u202e"
PACKAGES = ("memconsole", "backends")


@pytest.mark.parametrize(
    "arguments",
    [
        (ESCAPES,),
        ("plan", ESCAPES),
        ("plan", f"--{ESCAPES}"),
        ("plan", "--set", ESCAPES),
        ("plan", "--set", f"{ESCAPES}=1"),
        ("plan", "--set", f"train.seed={ESCAPES}"),
        ("plan", "--set", f"model.name={ESCAPES}"),
        ("plan", "--plan", ESCAPES),
        ("plan", "--preset", ESCAPES),
        ("logs", "--attempt", ESCAPES),
        ("report", ESCAPES),
        (f"--{ESCAPES}",),
    ],
)
def test_control_characters_that_are_typed_are_shown_and_never_sent(
    arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["memconsole", *arguments])
    with pytest.raises(SystemExit) as left:
        command_line.main()
    assert left.value.code == 2
    printed = "".join(capsys.readouterr())
    assert "bad" in printed or "no runs yet" in printed
    assert not set(printed) & {"\x1b", "\x07", "\x9b", "\u202e"}


def test_what_a_command_writes_nobody_else_can_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["memconsole", "--version"])
    for given, left in ((0, 0o022), (0o077, 0o077), (0o002, 0o022), (0o027, 0o027)):
        before = os.umask(given)
        try:
            with pytest.raises(SystemExit) as ended:
                command_line.main()
        finally:
            found = os.umask(before)
        assert ended.value.code == 0
        assert found == left


def test_a_program_in_the_current_folder_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("platform", "json", "psutil", "memconsole"):
        (tmp_path / f"{name}.py").write_text(
            f"open({str(tmp_path / 'ran')!r}, 'a').write('{name} ')"
        )
    monkeypatch.chdir(tmp_path)
    assert read_once().devices
    assert not (tmp_path / "ran").exists()


def test_no_module_is_started_from_the_current_folder() -> None:
    started = 0
    for package in PACKAGES:
        for path in (Path(memconsole.__file__).parents[1] / package).rglob("*.py"):
            text = path.read_text()
            for node in ast.walk(ast.parse(text)) if '"-m"' in text else ():
                if isinstance(node, ast.List | ast.Tuple):
                    words = [w.value for w in node.elts if isinstance(w, ast.Constant)]
                    if "-m" in words:
                        started += 1
                        assert words[words.index("-m") - 1] == "-P", f"{path}:{node.lineno}"
    assert started >= 6


MALFORMED = (
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"GET / HTTP/9.9\r\n\r\n",
    b"NONSENSE \xff\xff HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET / HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
    b"GET /?token=\xe9 HTTP/1.1\r\nHost: {host}\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: {host}\r\nCookie: memconsole-{port}=\xe9\r\n\r\n",
    b"GET /ws HTTP/1.1\r\nHost: {host}\r\nUpgrade: websocket\r\nCookie: =;\xff\r\n\r\n",
    b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\nHost: {host}\r\n\r\n",
)


async def test_malformed_requests_are_refused_and_print_nothing(
    capfd: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("aiohttp")
    pytest.importorskip("textual_serve")
    from memconsole.web.server import WebConsole

    server = WebConsole(["true"])
    ready = asyncio.Event()
    serving = asyncio.create_task(server.serve(lambda address: ready.set()))
    await asyncio.wait_for(ready.wait(), 10)
    host = f"127.0.0.1:{server.port}".encode()
    for request in MALFORMED:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(request.replace(b"{host}", host).replace(b"{port}", host[10:]))
        status = (await asyncio.wait_for(reader.readline(), 10)).split()[1]
        assert status in (b"400", b"403"), request
        writer.close()
    # The door of a used address compares what cookies hold.
    session = server.door.admit(server.door.address.partition("token=")[2])
    assert session is not None
    assert not server.door.knows("\udce9")
    assert server.door.knows(session)
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
    assert "".join(capfd.readouterr()) == ""
