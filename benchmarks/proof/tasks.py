"""Retrieval tasks on real text (after RULER, arXiv 2404.06654): facts planted in it, asked for at the end.

Everything is token ids, so that the training machine needs no tokenizer: :class:`Phrases` holds the pieces, tokenized once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

DIGITS = 5  # of a value: a guess is right once in 10**5
WORDS = """
    apple anchor arrow basket beach bell bird boat book bottle bread bridge brush bucket butter button camera candle
    carpet castle cat chain chair cheese circle clock cloud coat coffee coin copper corn cotton crown cup desk
    diamond doctor dog door dragon dress drum eagle engine farmer feather fence field fire fish flag flower forest
    fork fox garden gate ghost glass goat gold guitar hammer harbor hat horse hotel house iron island jacket key
    kitchen knife lady lake lamp leaf lemon letter lion lock machine market mask meadow metal milk mirror monkey
    moon mountain mouse needle nest nose ocean onion orange organ oven owl paint palace paper parrot pear pencil
    pepper piano pillow pilot planet plate pocket potato prince pump queen rabbit rain ribbon rice ring river road
    robot rock roof rope rose sail salt sand school sea shadow sheep shell ship shirt shoe silver sister snake snow
    soap soldier spider spoon star station stone storm street sugar sun sword table tailor teacher temple tiger
    tower train tree truck turtle valley village violin wagon wall watch water whale wheel window wine winter wolf
    wood yard zebra
""".split()  # noqa: SIM905 - a page of words, not of quotes
PIECES = {
    "fact": "\n\nThe secret number of the",
    "fact_is": " is ",
    "fact_end": ".\n\n",
    "question": "\n\nQuestion: What is the secret number of the",
    "question_end": "?\nAnswer: The secret number of the",
    "chain": "\n\nThe secret number of the",
    "chain_is": " is the secret number of the",
}
TASKS = ("needle", "multikey", "chain")
DISTRACTORS = 15  # other facts of the same form in "multikey"
KEY_WORDS = 2  # names in a key, one token each
HOPS = 2  # of "chain": facts that refer to another, before the one that holds the value


@dataclass(frozen=True)
class Phrases:
    """Token ids of the pieces, of the names that keys are made of (each one token), and of the ten digits."""

    pieces: dict[str, list[int]]
    names: list[int]
    digits: list[int]

    @classmethod
    def from_tokenizer(cls, tokenizer: Any) -> Phrases:
        """The pieces under a ``transformers`` tokenizer; words that are not one token are left out.

        Raises:
            ValueError: a digit is not one token.
        """

        def ids(text: str) -> list[int]:
            return list(tokenizer(text, add_special_tokens=False)["input_ids"])

        digits = [ids(str(digit)) for digit in range(10)]
        if any(len(digit) != 1 for digit in digits):
            raise ValueError("the tokenizer does not hold each digit as one token")
        names = [ids(f" {word}") for word in WORDS]
        return cls(
            {name: ids(text) for name, text in PIECES.items()},
            [name[0] for name in names if len(name) == 1],
            [digit[0] for digit in digits],
        )

    def save(self, path: Path) -> None:
        """Writes JSON."""
        path.write_text(json.dumps(asdict(self)) + "\n")

    @classmethod
    def load(cls, path: Path) -> Phrases:
        """Reads what :meth:`save` wrote."""
        return cls(**json.loads(path.read_text()))

    def join(self, *parts: str | list[int]) -> np.ndarray:
        """Ids of pieces (by name) and of id lists, one after the other."""
        lists = [self.pieces[part] if isinstance(part, str) else part for part in parts]
        return np.array([token for ids in lists for token in ids], dtype=np.int64)

    def fact(self, key: list[int], value: list[int]) -> np.ndarray:
        """The sentence that states a value."""
        return self.join("fact", key, "fact_is", value, "fact_end")

    def reference(self, key: list[int], other: list[int]) -> np.ndarray:
        """The sentence that makes a key's value that of another key."""
        return self.join("chain", key, "chain_is", other, "fact_end")

    def question(self, key: list[int]) -> np.ndarray:
        """The question, and the answer up to the value."""
        return self.join("question", key, "question_end", key, "fact_is")

    def keys(self, count: int, rng: np.random.Generator) -> list[list[int]]:
        """Different keys of two words each."""
        numbers = rng.choice(len(self.names) ** 2, size=count, replace=False)
        return [[self.names[n // len(self.names)], self.names[n % len(self.names)]] for n in numbers]

    def value(self, rng: np.random.Generator) -> list[int]:
        """Digits of a value."""
        return [self.digits[digit] for digit in rng.integers(0, 10, DIGITS)]


@dataclass(frozen=True)
class Sample:
    """A prompt with its answer at the end: ``tokens`` int64 ``[length]``, the last ``DIGITS`` of them the answer."""

    tokens: np.ndarray
    depth: float


def insert(text: np.ndarray, planted: list[np.ndarray], positions: np.ndarray) -> np.ndarray:
    """``text`` with each of ``planted`` put in before the position of the same number (ascending)."""
    parts, before = [], 0
    for piece, position in zip(planted, positions, strict=True):
        parts += [text[before:position], piece]
        before = position
    return np.concatenate([*parts, text[before:]])


def make_sample(task: str, length: int, text: np.ndarray, phrases: Phrases, rng: np.random.Generator) -> Sample:
    """One sample of a task in real text.

    Args:
        task: one of :data:`TASKS`.
        length: tokens of the sample, the answer included.
        text: token ids to take the text from, longer than ``length``.
        phrases: the pieces.
        rng: what everything random comes from.

    Raises:
        ValueError: for another task.
    """
    if task not in TASKS:
        raise ValueError(f"task={task!r}: must be one of {', '.join(TASKS)}")
    count = {"needle": 1, "multikey": 1 + DISTRACTORS, "chain": 1 + HOPS}[task]
    keys, values = phrases.keys(count, rng), [phrases.value(rng) for _ in range(count)]
    if task == "chain":
        facts = [phrases.fact(keys[0], values[0])]
        facts += [phrases.reference(keys[n], keys[n - 1]) for n in range(1, count)]
        asked, holder, answer = keys[-1], 0, values[0]
    else:
        facts = [phrases.fact(key, value) for key, value in zip(keys, values, strict=True)]
        holder = int(rng.integers(count))
        asked, answer = keys[holder], values[holder]
    tail = np.concatenate([phrases.question(asked), np.array(answer, dtype=np.int64)])
    room = length - len(tail) - sum(map(len, facts))
    start = int(rng.integers(len(text) - room))
    body = text[start : start + room].astype(np.int64)
    positions = np.sort(rng.integers(0, room, count))
    tokens = np.concatenate([insert(body, facts, positions), tail])
    return Sample(tokens, float(positions[holder]) / room)


def make_samples(task: str, length: int, count: int, text: np.ndarray, phrases: Phrases, seed: int) -> Iterator[Sample]:
    """Samples of one task and length; the same for the same seed."""
    rng = np.random.default_rng([seed, TASKS.index(task), length])
    for _ in range(count):
        yield make_sample(task, length, text, phrases, rng)


def training_sequence(
    text: np.ndarray, length: int, questions: int, phrases: Phrases, rng: np.random.Generator
) -> np.ndarray:
    """A window of ``text`` with facts planted in its first half and asked for in its second, int64 ``[length]``."""
    keys, values = phrases.keys(questions, rng), [phrases.value(rng) for _ in range(questions)]
    facts = [phrases.fact(key, value) for key, value in zip(keys, values, strict=True)]
    asked = rng.permutation(questions)
    answers = [np.concatenate([phrases.question(keys[n]), values[n], phrases.pieces["fact_end"]]) for n in asked]
    room = length - sum(map(len, facts)) - sum(map(len, answers))
    start = int(rng.integers(len(text) - room))
    body = text[start : start + room].astype(np.int64)
    early = np.sort(rng.integers(0, room // 2, questions))
    late = np.sort(rng.integers(room // 2, room, questions))
    return insert(body, facts + answers, np.concatenate([early, late]))


def answer_rows(tokens: np.ndarray, phrases: Phrases) -> np.ndarray:
    """int64 ``[questions * DIGITS]``: the rows of :func:`training_sequence` that predict the digits of its answers."""
    mark = np.array(phrases.pieces["question_end"], dtype=tokens.dtype)
    windows = np.lib.stride_tricks.sliding_window_view(tokens, len(mark))
    ends = np.flatnonzero((windows == mark).all(1)) + len(mark)
    first = ends + KEY_WORDS + len(phrases.pieces["fact_is"])
    return (first[:, None] - 1 + np.arange(DIGITS)[None, :]).flatten().astype(np.int64)
