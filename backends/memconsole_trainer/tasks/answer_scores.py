"""Scores of answers, and two baselines without a model: the most frequent answer, and that to the nearest question."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

Answers = Mapping[str, str]
"""The answers of one record, by name."""


def scores(truths: Sequence[Answers], answers: Sequence[Answers]) -> dict[str, float]:
    """Exact match and token F1 (Rajpurkar et al. 2016, arXiv:1606.05250, §6.1): the means over all
    answers, and of each answer by name if there are several."""
    sums: dict[str, float] = {}
    counts: Counter[str] = Counter()
    for truth, answer in zip(truths, answers, strict=True):
        for name, wanted in truth.items():
            expected, given = _words(wanted), _words(answer.get(name, ""))
            values = {"exact_match": float(expected == given), "token_f1": f1(expected, given)}
            for measure, value in values.items():
                for key in (measure, f"{measure}_{name}"):
                    sums[key] = sums.get(key, 0.0) + value
                    counts[key] += 1
    several = len({name for truth in truths for name in truth}) > 1
    means = {key: total / counts[key] for key, total in sums.items()}
    return means if several else {k: means[k] for k in ("exact_match", "token_f1") if k in means}


def f1(wanted: Sequence[str], given: Sequence[str]) -> float:
    """Harmonic mean of precision and recall of the words."""
    common = sum((Counter(wanted) & Counter(given)).values())
    if not wanted or not given:
        return float(not wanted and not given)
    return 2.0 * common / (len(wanted) + len(given))


def most_frequent(answers: Sequence[Answers]) -> Answers:
    """The most frequent answer of each name."""
    names = {name for one in answers for name in one}
    return {
        name: Counter(one[name] for one in answers if name in one).most_common(1)[0][0]
        for name in names
    }


class Nearest:
    """Finds the text with the most similar words: cosine of TF-IDF (Salton and Buckley 1988)."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._counts = [Counter(_words(text)) for text in texts]
        texts_with = Counter(word for counts in self._counts for word in counts)
        self._idf = {word: math.log(len(texts) / count) + 1.0 for word, count in texts_with.items()}
        self._postings: dict[str, list[tuple[int, float]]] = {}
        """For each word, the texts that contain it, with the word's weight in each."""
        for number, counts in enumerate(self._counts):
            weights = {word: count * self._idf[word] for word, count in counts.items()}
            norm = math.sqrt(sum(w * w for w in weights.values())) or 1.0
            for word, weight in weights.items():
                self._postings.setdefault(word, []).append((number, weight / norm))

    def of(self, text: str) -> int:
        """The number of the nearest text; the first one if none shares a word."""
        similarity: dict[int, float] = {}
        for word, count in Counter(_words(text)).items():
            for number, weight in self._postings.get(word, ()):
                similarity[number] = similarity.get(number, 0.0) + weight * count * self._idf[word]
        return max(similarity, key=lambda number: (similarity[number], -number), default=0)


def _words(text: str) -> list[str]:
    return text.lower().split()
