"""The scorer of mathematical answers."""

from __future__ import annotations

import pytest

from benchmarks.studies.scoring import is_correct, last_boxed


@pytest.mark.parametrize(
    ("text", "boxed"),
    [
        (r"so \boxed{42}.", "42"),
        (r"\boxed{1} and then \boxed{2}", "2"),
        (r"\boxed{\frac{1}{\sqrt{2}}}", r"\frac{1}{\sqrt{2}}"),
        (r"\boxed {7}", "7"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{5} and \boxed{6", "5"),  # the response was cut off
        (r"\fbox{3}", "3"),
        (r"\boxed{}", ""),
        ("no box, 42", None),
        (r"\boxed{unfinished", None),
        ("", None),
    ],
)
def test_the_last_complete_box_counts(text, boxed):
    assert last_boxed(text) == boxed


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"\boxed{042}", "42"),
        (r"\boxed{ 42 }", "42"),
        (r"\boxed{1,234}", "1234"),
        (r"\boxed{-3}", "-3"),
        (r"\boxed{0.5}", r"\frac{1}{2}"),
        (r"\boxed{\dfrac12}", "1/2"),
        (r"\boxed{\frac{2}{4}}", r"\frac{1}{2}"),
        (r"\boxed{-\frac{1}{3}}", r"\frac{-1}{3}"),
        (r"\boxed{$7$}", "7"),
        (r"\boxed{12\text{ cm}}", "12cm"),
        (r"\boxed{\left( 1, 2 \right)}", "(1,2)"),
        (r"\boxed{90^\circ}", "90"),
        (r"\boxed{x^{2}+1}", "x^{2} + 1"),
        (r"\boxed{70.}", "70"),
        (r"\boxed{204}", 204),
    ],
)
def test_equal_answers(response, answer):
    assert is_correct(response, answer)


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("42", "42"),
        (r"\boxed{43}", "42"),
        (r"\boxed{42} no, \boxed{43}", "42"),
        (r"\boxed{}", "0"),
        (r"\boxed{\frac{1}{0}}", "0"),
        (r"\boxed{1,23}", "123"),
        (r"\boxed{12}", "-12"),
        (r"\boxed{x}", "y"),
    ],
)
def test_other_answers(response, answer):
    assert not is_correct(response, answer)
