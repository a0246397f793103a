"""The pages say what is there: files, links, settings, commands and options that they name exist."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

from memconsole.cli.main import COMMANDS, cli
from memconsole.plan.plan import SETTINGS

ROOT = Path(__file__).parents[3]
README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]  # fmt: skip
FILE = re.compile(r"`((?:memconsole|backends|tests|screenshots|docs)/[\w./-]+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
COMMAND = re.compile(r"^(?:\$ )?memconsole ([a-z-]+)([^\n|;#]*)", re.MULTILINE)
"""A command and its arguments."""
OPTION = re.compile(r"(?<!\S)--[a-z-]+")
SECTIONS = sorted({key.partition(".")[0] for key in SETTINGS if "." in key})
SETTING = re.compile(rf"(?:--set |`)((?:{'|'.join(SECTIONS)})\.(?!json\b)\w+)(?:=|`| =)")
SAID = re.compile(r"```\n(.*?)```|`([^`]+)`", re.DOTALL)
"""What stands in code, in a block or in a line."""


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def anchors(page: Path) -> set[str]:
    """The names that links give a page's headings."""
    titles = re.findall(r"^#+ (.+)$", text_of(page), re.MULTILINE)
    return {re.sub(r"[^\w\s-]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_that_a_page_names_exists(page: Path) -> None:
    named = set(FILE.findall(text_of(page)))
    assert not sorted(path for path in named if not (ROOT / path).exists())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    lost = []
    for link in LINK.findall(text_of(page)):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path) if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            lost.append(link)
    assert not lost


def commands(page: Path) -> list[tuple[str, str]]:
    """The commands that a page names in code, with their arguments."""
    said = SAID.findall(text_of(page))
    code = [block.replace("\\\n", " ") or line.replace("\n", " ") for block, line in said]
    return COMMAND.findall("\n".join(code))


def options(name: str) -> set[str]:
    """The options of a command and of its subcommands."""
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    inner = command.commands.values() if isinstance(command, click.Group) else ()
    every = [p for c in (command, *inner) for p in c.get_params(click.Context(c))]
    return {word for p in every for word in (*p.opts, *p.secondary_opts)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_setting_and_command_that_a_page_names_exists(page: Path) -> None:
    assert not set(SETTING.findall(text_of(page))) - set(SETTINGS)
    for name, arguments in commands(page):
        assert name in COMMANDS
        assert not set(OPTION.findall(arguments)) - options(name), name


def test_every_setting_is_on_a_page() -> None:
    text = "".join(map(text_of, PAGES))
    assert not [key for key in SETTINGS if f"`{key}" not in text and f" {key}=" not in text]


def test_the_readme_is_short_and_leads_to_every_page_and_every_command() -> None:
    text = text_of(README)
    assert len(text.splitlines()) <= 200
    linked = {(README.parent / link.partition("#")[0]).resolve() for link in LINK.findall(text)}
    assert linked >= set(PAGES) - {README}
    table = text[text.index("## Commands") : text.index("## Your own model")]
    assert not [name for name in COMMANDS if not re.search(rf"`{name}\b", table)]


def test_every_flag_of_the_story_trainer_has_its_setting_or_command() -> None:
    flags = (
        "dataset-id dataset-config text-column split target-params vocab-size seq-len stride epochs batch-size "
        "learning-rate gradient-accumulation-steps use-streaming no-streaming use-mixed-precision "
        "use-8bit-optimizer shuffle-buffer-size max-examples output-dir log-every save-every seed"
    )
    rows = re.findall(
        r"^\| (`--[^|]+) \| ([^|]+) \|$", text_of(ROOT / "docs" / "systems.md"), re.MULTILINE
    )
    assert [
        flag for left, _ in rows for flag in re.findall("--([a-z0-9-]+)", left)
    ] == flags.split()
    for left, here in rows:
        assert set(SETTING.findall(here)) or COMMAND.search(here.strip("`")), left
