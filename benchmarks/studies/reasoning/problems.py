r"""Problems whose solution is written out: chains of assignments modulo 10 among distractors, and what checks a
solution.

A problem assigns a value to every name, once, in any order, and asks for one of them::

    ka = 7 ; po = ka + 5 ; ri = po * ka ; mu = 3 ; ... find ri ;

Its solution names the chain from the asked name to the one given as a number, then computes along it, citing each
assignment, the values it needs and the result, with checks of earlier results in between::

    plan ri po ka ; ka = 7 ; po = ka + 5 = 7 + 5 = 2 ; ri = po * ka = 2 * 7 = 4 ; \boxed{ 4 } end

Every word of the solution is found by a look-up: in the problem (assignments), in the plan (what comes next) or in
earlier steps (values). Text is one word per token, words separated by spaces.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

MODULUS = 10
SIGNS = ("+", "-", "*")
OPERATIONS: dict[str | None, Callable[[int, int], int]] = {
    "+": lambda a, b: (a + b) % MODULUS,
    "-": lambda a, b: (a - b) % MODULUS,
    "*": lambda a, b: a * b % MODULUS,
}
NAMES = tuple(c + v for c in "bdfghjklmnprstvwz" for v in "aeiou")  # 85
DIGITS = tuple(str(digit) for digit in range(MODULUS))
WORDS = ("pad", ";", "=", *SIGNS, "find", "plan", "check", "\\boxed{", "}", "end", *DIGITS, *NAMES)
INDEX = {word: index for index, word in enumerate(WORDS)}
CHECK_EVERY = 4  # steps between two checks
MAX_NAMES = len(NAMES)


@dataclass(frozen=True)
class Assignment:
    """``name = digit`` (the digit in ``left``), or ``name = left operation right``, right being a name or a digit."""

    name: str
    left: str
    operation: str | None = None
    right: str | None = None

    def words(self) -> list[str]:
        return [self.name, "=", self.left, *([self.operation, self.right] if self.operation and self.right else [])]


@dataclass(frozen=True)
class Problem:
    """Assignments in the order of the text; ``chain`` runs from the name given as a number to the asked one."""

    assignments: tuple[Assignment, ...]
    chain: tuple[str, ...]

    @property
    def asked(self) -> str:
        return self.chain[-1]

    def words(self) -> list[str]:
        """What the model reads."""
        return [*(word for one in self.assignments for word in [*one.words(), ";"]), "find", self.asked, ";"]

    def text(self) -> str:
        return " ".join(self.words())


def draw(seed: int, chain: int, distractors: int) -> Problem:
    """A problem of ``chain`` assignments that matter and ``distractors`` that do not; its length depends on both alone.

    A third of the chain's operands on the right are names of earlier links. Distractors begin at a number (every
    fourth), or depend on a link of the chain or on another distractor, so that no name's neighborhood gives the chain
    away.

    Raises:
        ValueError: ``chain`` is below 2, ``distractors`` is negative, or both need more names than there are.
    """
    if chain < 2:
        raise ValueError(f"chain must be at least 2 assignments, got {chain}")
    if distractors < 0 or chain + distractors > MAX_NAMES:
        raise ValueError(
            f"distractors must be from 0 to {MAX_NAMES - chain} beside a chain of {chain}, got {distractors}"
        )
    source = random.Random(seed)
    names = source.sample(NAMES, chain + distractors)
    links, others = names[:chain], names[chain:]
    assignments = [Assignment(links[0], source.choice(DIGITS))]
    for index in range(1, chain):
        right = source.choice(links[:index]) if source.random() < 1 / 3 else source.choice(DIGITS)
        assignments.append(Assignment(links[index], links[index - 1], source.choice(SIGNS), right))
    for index, name in enumerate(others):
        if index % 4 == 0:
            assignments.append(Assignment(name, source.choice(DIGITS)))
            continue
        left = source.choice([*links, *others[:index]])
        right = source.choice(links) if source.random() < 1 / 3 else source.choice(DIGITS)
        assignments.append(Assignment(name, left, source.choice(SIGNS), right))
    source.shuffle(assignments)
    return Problem(tuple(assignments), tuple(links))


def values(problem: Problem) -> dict[str, int]:
    """The value of every name, from the assignments alone.

    Raises:
        ValueError: a name has no value: it is not assigned, or depends on itself.
    """
    known: dict[str, int] = {}
    open_ones = list(problem.assignments)
    while open_ones:
        later = []
        for one in open_ones:
            found = [
                known.get(word, int(word) if word in DIGITS else None) for word in (one.left, one.right or one.left)
            ]
            left, right = found
            if left is None or right is None:
                later.append(one)
            else:
                known[one.name] = OPERATIONS[one.operation](left, right) if one.operation else left
        if len(later) == len(open_ones):
            raise ValueError(f"names without a value: {', '.join(one.name for one in later)}")
        open_ones = later
    return known


def steps(problem: Problem) -> list[list[str]]:
    """The solution, step by step, without the separators: plan, computations with checks between them, the answer."""
    known, by_name = values(problem), {one.name: one for one in problem.assignments}
    written = [["plan", *reversed(problem.chain)]]
    for index, name in enumerate(problem.chain):
        one = by_name[name]
        step = one.words()
        if one.operation and one.right:
            numbers = [str(known.get(word, word)) for word in (one.left, one.right)]
            step += ["=", numbers[0], one.operation, numbers[1], "=", str(known[name])]
        written.append(step)
        if index % CHECK_EVERY == CHECK_EVERY - 1:
            earlier = problem.chain[index - CHECK_EVERY + 1]
            written.append(["check", earlier, "=", str(known[earlier])])
    written.append(["\\boxed{", str(known[problem.asked]), "}"])
    return written


def solution(problem: Problem) -> list[str]:
    """What the model is to write."""
    *before, last = steps(problem)
    return [*(word for step in before for word in [*step, ";"]), *last, "end"]


def answer(problem: Problem) -> str:
    return str(values(problem)[problem.asked])


@dataclass(frozen=True)
class Verdict:
    """Steps that are right of those asked for, the first wrong one, and whether the answer is right."""

    right: int
    total: int
    first_wrong: int | None
    correct: bool


def verify(problem: Problem, written: list[str]) -> Verdict:
    """Hold every step of a written solution to the problem, from the problem and what is known to be true alone.

    A step is right where it says what the solution's step in its place says; a solution may stop early or go on too
    long. The answer is that of the last complete ``\\boxed{ x }``, whatever stands before it.
    """
    expected = steps(problem)
    found = split(written)
    right = [index < len(found) and found[index] == step for index, step in enumerate(expected)]
    boxed = None
    for index, word in enumerate(written):
        if word == "\\boxed{" and len(written) > index + 2 and written[index + 2] == "}":
            boxed = written[index + 1]
    wrong = [index for index, is_right in enumerate(right) if not is_right]
    return Verdict(sum(right), len(right), wrong[0] if wrong else None, boxed == answer(problem))


def split(written: list[str]) -> list[list[str]]:
    """Steps of a solution: what separators and the end leave."""
    found: list[list[str]] = [[]]
    for word in written:
        if word == "end":
            break
        if word == ";":
            found.append([])
        else:
            found[-1].append(word)
    return found if found[-1] else found[:-1]


def encode(words: list[str]) -> list[int]:
    """Token indices.

    Raises:
        ValueError: a word is none of the vocabulary.
    """
    unknown = next((word for word in words if word not in INDEX), None)
    if unknown is not None:
        raise ValueError(f"words must be of the vocabulary of {len(WORDS)} words, got {unknown!r}")
    return [INDEX[word] for word in words]


def decode(ids: list[int]) -> list[str]:
    return [WORDS[index] for index in ids]


def parse(text: str) -> Problem:
    """A problem from its text, as :meth:`Problem.text` writes it.

    Raises:
        ValueError: an assignment or the question is not of that form, or what is asked has no chain to a number.
    """
    parts = [part.split() for part in text.strip().removesuffix(";").split(";")]
    assignments = []
    for part in parts[:-1]:
        if len(part) not in (3, 5) or part[1] != "=" or (len(part) == 5 and part[3] not in SIGNS):
            raise ValueError(
                f"assignments must read 'name = digit' or 'name = name op operand', got {' '.join(part)!r}"
            )
        assignments.append(Assignment(part[0], *part[2:]))
    if len(parts[-1]) != 2 or parts[-1][0] != "find":
        raise ValueError(f"a problem must end with 'find name ;', got {' '.join(parts[-1])!r}")
    by_name = {one.name: one for one in assignments}
    chain = [parts[-1][1]]
    while (one := by_name.get(chain[-1])) is not None and one.operation and len(chain) <= len(assignments):
        chain.append(one.left)
    if one is None or one.operation:
        raise ValueError(f"{parts[-1][1]} must have a chain of assignments to a number, got none")
    return Problem(tuple(assignments), tuple(reversed(chain)))
