r"""Scoring of mathematical answers: the last ``\boxed{}`` of a response against the expected answer."""

from __future__ import annotations

import re
from fractions import Fraction


def last_boxed(text: str) -> str | None:
    r"""What the last complete ``\boxed{...}`` (or ``\fbox{...}``) holds, braces nested; None without one."""
    for match in reversed(list(re.finditer(r"\\(?:boxed|fbox)\s*\{", text))):
        depth, index = 1, match.end()
        while index < len(text) and depth:
            escaped = text[index - 1] == "\\"
            depth += 0 if escaped else {"{": 1, "}": -1}.get(text[index], 0)
            index += 1
        if depth == 0:
            return text[match.end() : index - 1]
    return None


def is_correct(response: str, answer: str) -> bool:
    """The last boxed expression equals ``answer``, as a number where both are numbers, else as normalized text."""
    given = last_boxed(response)
    if given is None:
        return False
    left, right = normalize(given), normalize(str(answer))
    a, b = _number(left), _number(right)
    return a == b if a is not None and b is not None else left == right


def normalize(text: str) -> str:
    r"""Without what does not change the meaning: spaces, ``$``, ``\left``, ``\text{}``, degrees, trailing periods."""
    text = text.strip()
    text = re.sub(r"\\(?:text|mathrm|mbox)\s*\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"\\(?:left|right|,|;|:|!|quad|qquad)(?![a-zA-Z])", "", text)
    text = text.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac").replace("\\%", "%")
    text = text.replace("$", "").replace("\\ ", "").replace("^{\\circ}", "").replace("^\\circ", "")
    text = re.sub(r"\\frac\s*([0-9])\s*([0-9])", r"\\frac{\1}{\2}", text)
    return re.sub(r"\s+", "", text).rstrip(".")


def _number(text: str) -> Fraction | None:
    r"""Integers (with thousands separators), decimals, a/b and ``\frac{a}{b}``, with a sign."""
    sign = -1 if text.startswith("-") else 1
    text = text.lstrip("+-")
    if fraction := re.fullmatch(r"\\frac\{(-?\d+)\}\{(-?\d+)\}", text) or re.fullmatch(r"(\d+)/(\d+)", text):
        top, bottom = (int(part) for part in fraction.groups())
        return sign * Fraction(top, bottom) if bottom else None
    if re.fullmatch(r"\d{1,3}(,\d{3})+(\.\d+)?", text):
        text = text.replace(",", "")
    return sign * Fraction(text) if re.fullmatch(r"\d+(\.\d+)?|\.\d+", text) else None
