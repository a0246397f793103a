"""Makes ratings with a structure that can be learned, and the items' titles and genres.

Items belong to genres, and few items of a genre are popular (Zipf). Each item has a few successors:
items that are often rated right after it. A user likes some genres more than others, rates items in
sessions, and drifts from genre to genre. The next item is, with fixed probabilities, a successor of the
last item, an item of the current genre, an item of the genre that usually follows, or any popular
item. No user rates an item twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import numpy as np
from numpy.typing import NDArray

from memconsole.plan.plan import PlanError
from memconsole_trainer.data.make.bar import Bar
from memconsole_trainer.data.make.maker import Facts, Request
from memconsole_trainer.randomness import generator

SUCCESSORS = np.array([0.5, 0.25, 0.15, 0.1])
"""Probability of each successor of an item, if the next item is a successor."""
FOLLOWS, STAYS, DRIFTS = 0.6, 0.25, 0.1
"""Probabilities of a successor, of an item of the current genre, and of the genre after it; the rest is any item."""
SESSION = 8
"""Mean number of ratings of a session."""
TRIES = 8
"""The most draws to find an item that the user has not rated."""
LINE_BYTES = 24
"""About how long a line of ratings is."""
_KINDS = ("Action", "Animation", "Comedy", "Crime", "Drama", "Fantasy", "Horror", "Mystery", "Romance", "Western")  # fmt: skip
_WORDS = ("river", "winter", "stone", "garden", "harbor", "mirror", "thunder", "paper", "velvet", "ember", "island", "lantern")  # fmt: skip
Floats = NDArray[np.float64]


class World:
    """The items: genre, popularity and successors of each, numbered from 0."""

    def __init__(self, items: int, genres: int, seed: int) -> None:
        draw = generator(seed, "ratings/world")
        self.genre = draw.permutation(np.arange(items) % genres)
        self.members = [np.flatnonzero(self.genre == g) for g in range(genres)]
        rank = np.empty(items)
        for members in self.members:
            rank[members] = draw.permutation(len(members))
        self.weight = 1 / (rank + 1.5) ** 1.1
        self.of_genre = [np.cumsum(self.weight[m]) / self.weight[m].sum() for m in self.members]
        self.of_all = np.cumsum(self.weight) / self.weight.sum()
        ring = draw.permutation(genres)
        self.next_genre = np.empty(genres, np.int64)
        self.next_genre[ring] = np.roll(ring, 1)
        self.second = draw.integers(genres, size=items)
        self.successors = np.stack([self._successors(item, draw) for item in range(items)])
        self.words = draw.integers(len(_WORDS), size=(genres, 3))
        self.pick = draw.integers(3, size=items)

    def _successors(self, item: int, draw: np.random.Generator) -> NDArray[np.int64]:
        """Three items of the item's genre and one of the genre after it."""
        own, after = (
            self.members[g] for g in (self.genre[item], self.next_genre[self.genre[item]])
        )
        return np.append(draw.choice(own, 3), draw.choice(after))

    def popular(self, cumulative: Floats, draw: float) -> int:
        return int(np.searchsorted(cumulative, draw, "right"))


def history(world: World, length: int, draw: np.random.Generator) -> list[tuple[int, int]]:
    """The items and times of one user, in the order of time."""
    tastes = np.cumsum(draw.dirichlet(np.full(len(world.members), 0.3)))
    dice = draw.random((length, TRIES, 3))
    pauses = draw.integers(60, 600, size=length)
    time, genre, last = int(draw.integers(0, 10**8)) + 10**9, -1, -1
    met: set[int] = set()
    found = []
    for number in range(length):
        new = last < 0 or dice[number, 0, 2] < 1 / SESSION
        if new:
            genre, last = int(np.searchsorted(tastes, dice[number, 1, 2])), -1
            genre = min(genre, len(world.members) - 1)
            time += int(draw.integers(3_600, 40 * 86_400))
        for first, second, _ in dice[number]:
            item = _next(world, genre, last, first, second)
            if item not in met:
                break
        else:
            continue
        met.add(item)
        genre, last = int(world.genre[item]), item
        time += int(pauses[number])
        found.append((item, time))
    return found


def _next(world: World, genre: int, last: int, first: float, second: float) -> int:
    """One draw of the next item."""
    if last >= 0 and first < FOLLOWS:
        return int(world.successors[last, np.searchsorted(np.cumsum(SUCCESSORS)[:-1], second)])
    if first < FOLLOWS + STAYS:
        return int(world.members[genre][world.popular(world.of_genre[genre], second)])
    if first < FOLLOWS + STAYS + DRIFTS:
        after = int(world.next_genre[genre])
        return int(world.members[after][world.popular(world.of_genre[after], second)])
    return world.popular(world.of_all, second)


def make(request: Request, bar: Bar) -> Facts:
    """Write `ratings.dat` and `movies.dat` into the folder `request.out`."""
    items, genres, mean = (int(request.options[n]) for n in ("items", "genres", "history"))
    if not 2 <= genres <= items // 4:
        raise PlanError(f"--set genres={genres}: expected 2 to a quarter of items = {items}")
    if not 5 <= mean <= items // 2:
        raise PlanError(f"--set history={mean}: expected 5 to half of items = {items}")
    wanted = request.size.count or max(1, (request.size.size_bytes or 0) // LINE_BYTES)
    world = World(items, genres, request.seed)
    request.out.mkdir()
    _write_items(request.out / "movies.dat", world)
    written = users = 0
    with (request.out / "ratings.dat").open("w", encoding="ascii") as file:
        while written < wanted:
            users += 1
            written += _write_user(file, world, users, mean, request.seed)
            bar.at(min(written, wanted), wanted)
    return {
        "ratings": written,
        "users": users,
        "items": items,
        "genres": genres,
        "size_bytes": sum(f.stat().st_size for f in request.out.iterdir()),
    }


def _write_user(file: TextIO, world: World, user: int, mean: int, seed: int) -> int:
    draw = generator(seed, f"ratings/{user}")
    length = 5 + int(draw.geometric(1 / max(1, mean - 4))) - 1
    found = history(world, min(length, len(world.genre) // 2), draw)
    stars = draw.integers(1, 6, size=len(found))
    for (item, time), star in zip(found, stars, strict=True):
        file.write(f"{user}::{item + 1}::{star}::{time}\n")
    return len(found)


def _write_items(path: Path, world: World) -> None:
    with path.open("w", encoding="ascii") as file:
        for number, title in enumerate(_titles(world), start=1):
            genres = dict.fromkeys((world.genre[number - 1], world.second[number - 1]))
            named = "|".join(_genre(int(g)) for g in list(genres)[: 1 + number % 2])
            file.write(f"{number}::{title}::{named}\n")


def _genre(number: int) -> str:
    kind, more = _KINDS[number % len(_KINDS)], number // len(_KINDS)
    return kind if not more else f"{kind} {more + 1}"


def _titles(world: World) -> Iterator[str]:
    for number, genre in enumerate(world.genre):
        word = _WORDS[world.words[genre, world.pick[number]]]
        yield f"The {word.title()} {number + 1} ({1950 + number % 70})"
