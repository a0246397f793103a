"""Which devices a framework sees, and in what order, under CUDA_VISIBLE_DEVICES and the like."""

from __future__ import annotations

from collections.abc import Sequence


def visible_order(
    identifiers: Sequence[str], setting: str | None, variable: str
) -> tuple[list[int], str]:
    """Indices of the visible devices in the framework's order, and a note if some are hidden.

    `identifiers` are the devices' UUIDs. `setting` is the variable's value, None if it is not set.
    As in CUDA, an entry that matches no device hides itself and all entries after it.
    """
    everything = list(range(len(identifiers)))
    if setting is None:
        return everything, ""
    order: list[int] = []
    for word in (part.strip() for part in setting.split(",")):
        index = _index(word, identifiers)
        if index is None or index in order:
            break
        order.append(index)
    hidden = len(everything) - len(order)
    if not hidden:
        return order, ""
    count = "1 GPU" if hidden == 1 else f"{hidden} GPUs"
    return order, f"{count} hidden by {variable}"


def _index(word: str, identifiers: Sequence[str]) -> int | None:
    if word.isascii() and word.isdigit():
        index = int(word)
        return index if index < len(identifiers) else None
    starts = [i for i, name in enumerate(identifiers) if word and name.startswith(word)]
    return starts[0] if len(starts) == 1 else None
