"""Random sequences of everything one can do with a cache: it equals a model of lists after every call."""

from __future__ import annotations

from tests._helpers.cache_machine import run


def test_any_sequence_of_calls_equals_the_list_model():
    run(500)
