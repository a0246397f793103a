"""The completion script of each shell, and the format of the answers that the script reads."""

from __future__ import annotations

import os
import re

from click.shell_completion import (
    BashComplete,
    CompletionItem,
    FishComplete,
    ZshComplete,
    add_completion_class,
    split_arg_string,
)

_WORD_BREAKS = re.compile(r".*[=:]", re.DOTALL)
_BASH = """\
%(complete_func)s() {
    local IFS=$'\\n' completion
    COMPREPLY=()
    for completion in $(env COMP_LINE="$COMP_LINE" COMP_POINT="$COMP_POINT" \\
            %(complete_var)s=bash_complete "$1" 2>/dev/null); do
        case $completion in
            dir,*) compopt -o dirnames ;;
            file,*) compopt -o default ;;
            open,*) compopt -o nospace; COMPREPLY+=("${completion#*,}") ;;
            *) COMPREPLY+=("${completion#*,}") ;;
        esac
    done
}
complete -o nosort -F %(complete_func)s %(prog_name)s
"""

_ZSH = (
    ZshComplete.source_template.replace("    local -a response\n", "    local -a response opened\n")
    .replace(
        """        elif [[ "$type" == "dir" ]]; then""",
        """        elif [[ "$type" == "open" ]]; then
            opened+=("$key":"$descr")
        elif [[ "$type" == "dir" ]]; then""",
    )
    .replace(
        """    if [ -n "$completions" ]; then""",
        """    if [ -n "$opened" ]; then
        _describe -V unsorted opened -U -S ''
    fi

    if [ -n "$completions" ]; then""",
    )
)


class Bash(BashComplete):
    """Bash breaks words at `=` and `:`. This class reads the whole line, and answers with the part
    after the last of them."""

    source_template = _BASH

    def get_completion_args(self) -> tuple[list[str], str]:
        line = os.environ["COMP_LINE"][: int(os.environ["COMP_POINT"])]
        words = split_arg_string(line)
        incomplete = "" if line.endswith((" ", "\t")) or not words else words.pop()
        self._head = len(found[0]) if (found := _WORD_BREAKS.match(incomplete)) else 0
        return words[1:], incomplete

    def format_completion(self, item: CompletionItem) -> str:
        kind = "open" if _goes_on(item) else item.type
        return f"{kind},{item.value[self._head :]}"


class Zsh(ZshComplete):
    """Click's script writes a space after `key=` and a folder. This one does not."""

    source_template = _ZSH

    def format_completion(self, item: CompletionItem) -> str:
        found: str = super().format_completion(item)
        return "open" + found.removeprefix("plain") if _goes_on(item) else found


class Fish(FishComplete):
    """Click's script cuts the description of a word at its first comma. This one does not."""

    source_template = FishComplete.source_template.replace(
        'string split ","', 'string split --max 1 ","'
    )


def _goes_on(item: CompletionItem) -> bool:
    """Whether more of the word is typed after this part of it."""
    return item.type == "plain" and item.value.endswith(("=", "/"))


def add_shells() -> None:
    """Use these scripts instead of click's."""
    for kind in (Bash, Zsh, Fish):
        add_completion_class(kind)
