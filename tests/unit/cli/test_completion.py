"""What the shell is offered after TAB, and the script that asks for it, in a real bash."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from memconsole.cli import completing
from memconsole.cli.completing import VARIABLE
from memconsole.cli.main import COMMANDS, cli
from memconsole.cli.shells import add_shells
from memconsole.plan import catalog
from memconsole.plan import plan as plans
from memconsole.plan.plan import Plan
from memconsole.runs.record import labels
from memconsole.runs.record.directory import RunDirectory
from memconsole.runs.record.run_store import create_run

ENGINE = "from memconsole.cli.main import main; main()"


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[RunDirectory, RunDirectory]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    made = create_run(Plan(), "low-rate")
    (made.checkpoints_path / "step-000000012").mkdir()
    return made, create_run(Plan(), "two words")


def offered(line: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What bash is told to put in place of the last word, after its last `=` or `:`."""
    add_shells()
    monkeypatch.setenv("COMP_LINE", line)
    monkeypatch.setenv("COMP_POINT", str(len(line)))
    monkeypatch.setenv(VARIABLE, "bash_complete")
    said = CliRunner().invoke(cli, prog_name="memconsole", complete_var=VARIABLE).output
    return [answer.partition(",")[2] for answer in said.splitlines() if answer]


def test_commands_presets_keys_and_values_are_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    assert offered("memconsole ", monkeypatch) == list(COMMANDS)
    assert offered("memconsole re", monkeypatch) == ["resume", "report"]
    assert offered("memconsole plan --preset ", monkeypatch) == list(catalog.presets())
    keys = offered("memconsole train --set ", monkeypatch)
    assert keys == [f"{key}=" for key in plans.SETTINGS]
    precision = list(plans.SETTINGS["optimize.precision"].choices)
    assert offered("memconsole plan --set optimize.precision=", monkeypatch) == precision
    llamas = [name for name in catalog.models() if name.startswith("llama")]
    assert offered("memconsole plan --set model.name=llama", monkeypatch) == llamas
    assert offered("memconsole plan --set nothing.like=", monkeypatch) == []


def test_runs_are_offered_by_name_where_that_is_one_word(
    runs: tuple[RunDirectory, RunDirectory], monkeypatch: pytest.MonkeyPatch
) -> None:
    named, unnamed = runs
    found = offered("memconsole report ", monkeypatch)
    assert (found[0], {*found[1:]}) == ("latest", {unnamed.id, "low-rate"})
    of_runs = "runs rename", "runs delete"
    assert "cpu" in offered("memconsole sample --device ", monkeypatch)
    for command in ("attach", "stop", "resume", "logs", "compare", "predict", *of_runs):
        assert offered(f"memconsole {command} low", monkeypatch) == ["low-rate"], command
    assert named.id in offered("memconsole report 2", monkeypatch)
    line = f"memconsole sample {named.id} --checkpoint "
    assert offered(line, monkeypatch) == ["best", "last", "step-12"]


def test_what_is_typed_finds_old_runs_too(
    runs: tuple[RunDirectory, RunDirectory], monkeypatch: pytest.MonkeyPatch
) -> None:
    named, _ = runs
    labels.tag(named.path, ["paper"], (), {})
    for number in range(4):
        labels.tag(create_run(Plan(), f"newer-{number}").path, [f"tag-{number}"], (), {})
    monkeypatch.setattr(completing, "MOST", 2)
    newest = ["latest", "newer-3", "newer-2"]
    assert offered("memconsole report ", monkeypatch) == newest
    assert offered("memconsole report low", monkeypatch) == ["low-rate"]
    assert offered(f"memconsole report {named.id}", monkeypatch) == [named.id]
    assert offered("memconsole runs --tag pa", monkeypatch) == ["paper"]
    assert offered("memconsole runs --tag tag", monkeypatch) == ["tag-0", "tag-1"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("resume low-rate --set train.ep", ["train.epochs="]),
        ("export-job low-rate --to skypilot --set device.name=h1", ["h100-80gb"]),
        ("export-job lo", ["low-rate"]),
        ("train --from lo", ["low-rate"]),
        ("web lo", ["low-rate"]),
        ("fit --keep optimize.com", ["optimize.compile"]),
        ("data make r", ["ratings"]),
        ("data inspect x.txt --set data.vocab_s", ["data.vocab_size="]),
        ("runs --tag b", ["baseline"]),
        ("runs tag low-rate --remove b", ["baseline"]),
    ],
)
def test_settings_runs_kinds_and_tags_are_offered_wherever_they_are_taken(
    line: str,
    words: list[str],
    runs: tuple[RunDirectory, RunDirectory],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    labels.tag(runs[0].path, ("baseline", "slow"), (), {})
    assert set(words) <= set(offered(f"memconsole {line}", monkeypatch))


def test_paths_are_offered_where_a_plan_or_a_setting_names_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("text.txt", "text two.txt", "other.txt", "texts/in.txt"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).touch()
    source = "memconsole train --set data.source="
    assert offered(f"{source}./te", monkeypatch) == ["./texts/", "./text.txt"]
    assert offered(f"{source}{tmp_path}/o", monkeypatch) == [f"{tmp_path}/other.txt"]
    monkeypatch.setenv("HOME", str(tmp_path))
    assert offered("memconsole plan --set model.name=~/texts/", monkeypatch) == ["~/texts/in.txt"]
    assert offered("memconsole plan --set optimize.precision=./", monkeypatch) == []
    add_shells()
    monkeypatch.setenv("COMP_LINE", "memconsole export-job tin")
    monkeypatch.setenv("COMP_POINT", "25")
    said = CliRunner().invoke(cli, prog_name="memconsole", complete_var=VARIABLE).output
    assert said.splitlines() == ["file,tin"]
    assert offered("memconsole data inspect equ", monkeypatch) == ["equipment", "equ"]


def with_program(folder: Path) -> dict[str, str]:
    """The environment of a shell that finds this program."""
    program = folder / "bin" / "memconsole"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{ENGINE}" "$@"\n')
    program.chmod(0o755)
    path = f"{program.parent}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "HOME": str(folder), "ZDOTDIR": str(folder)}


def test_bash_completes_by_the_printed_script(
    runs: tuple[RunDirectory, RunDirectory], tmp_path: Path
) -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("no bash")
    # `complete -p` proves the script is in force; readline then calls its function as here.
    script = """
        eval "$(memconsole completion bash)"
        complete -p memconsole
        for line in 'memconsole report low' 'memconsole plan --set optimize.precision=bf16-'; do
            COMP_LINE=$line COMP_POINT=${#line} _memconsole_completion memconsole
            echo "${COMPREPLY[@]}"
        done
    """
    done = subprocess.run(
        [bash, "--norc", "-c", script],
        env=with_program(tmp_path),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == [
        "complete -o nosort -F _memconsole_completion memconsole",
        "low-rate",
        "bf16-sr",
    ]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_the_scripts_of_other_shells_ask_this_program(shell: str) -> None:
    said = CliRunner().invoke(cli, ["completion", shell]).output
    assert f"{VARIABLE}={shell}_complete" in said


def test_fish_completes_by_the_printed_script(
    runs: tuple[RunDirectory, RunDirectory], tmp_path: Path
) -> None:
    fish = shutil.which("fish")
    if fish is None:
        pytest.skip("no fish")
    script = """
        memconsole completion fish | source
        complete -C 'memconsole report low'
        complete -C 'memconsole train --set optimize.lora_targets'
        complete -C 'memconsole plan --set optimize.precision=bf16-'
    """
    done = subprocess.run(
        [fish, "--no-config", "-c", script], env=with_program(tmp_path), capture_output=True,
        text=True, check=True,
    )  # fmt: skip
    assert done.stdout.splitlines() == [
        f"low-rate\t{runs[0].id}",
        f"optimize.lora_targets=\t{plans.SETTINGS['optimize.lora_targets'].help}",
        "optimize.precision=bf16-sr",
    ]


def test_zsh_completes_by_the_printed_script(
    runs: tuple[RunDirectory, RunDirectory], tmp_path: Path
) -> None:
    zsh = shutil.which("zsh")
    if zsh is None:
        pytest.skip("no zsh")
    # Keys typed into an interactive zsh; ^T prints the line as completion has left it.
    script = """
        zmodload zsh/zpty
        zpty shell zsh -f -i
        zpty -w shell 'autoload -Uz compinit; compinit -u; eval "$(memconsole completion zsh)"
            show() { print -r -- "@@$BUFFER@@"; }; zle -N show; bindkey "^T" show
            zle-line-init() { print rea""dy; }; zle -N zle-line-init'
        zpty -r -m shell before '*ready*'
        for line in 'report low' 'plan --set optimize.lora_ta'; do
            zpty -w -n shell "memconsole $line"$'\\t+\\x14\\x15'
            zpty -r -m shell shown '*@@*@@*'
            print -r -- "${${shown#*@@}%%@@*}"
        done
        zpty -d shell
    """
    done = subprocess.run(
        [zsh, "-f", "-c", script], env=with_program(tmp_path), capture_output=True, text=True,
        check=True, timeout=30,
    )  # fmt: skip
    assert done.stdout.splitlines() == [
        "memconsole report low-rate +",
        "memconsole plan --set optimize.lora_targets=+",
    ]
