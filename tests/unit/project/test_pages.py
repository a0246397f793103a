"""The pages say what is there: files, links, settings and commands that they name exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from memconsole.cli.main import COMMANDS
from memconsole.plan.plan import SETTINGS

ROOT = Path(__file__).parents[3]
README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]  # fmt: skip
FILE = re.compile(r"`((?:memconsole|backends|tests|screenshots|docs)/[\w./-]+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
COMMAND = re.compile(r"^memconsole ([a-z]+)\b", re.MULTILINE)
SETTING = re.compile(r"(?:--set |`)((?:model|data|device|train|optimize)\.\w+)(?:=|`| =)")
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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_setting_and_command_that_a_page_names_exists(page: Path) -> None:
    text = text_of(page)
    assert not set(SETTING.findall(text)) - set(SETTINGS)
    code = "\n".join(block or line for block, line in SAID.findall(text))
    assert not set(COMMAND.findall(code)) - set(COMMANDS)


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
