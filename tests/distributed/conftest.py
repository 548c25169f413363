"""Groups of processes that the tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests._helpers.ranks import Ranks


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Ranks]:
    ranks = Ranks(2)
    yield ranks
    ranks.stop()


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[Ranks]:
    ranks = Ranks(4)
    yield ranks
    ranks.stop()
