"""Budgets that differ between layers."""

from __future__ import annotations

from fastattn.validation import check_count


def pyramid_budgets(mean: int, num_layers: int, *, ratio: float = 0.25) -> tuple[int, ...]:
    r"""A budget for every layer that falls evenly from the first to the last (PyramidKV, arXiv 2406.02069).

    With :math:`n` layers and :math:`r` the ratio of the last layer's budget to the first's, layer :math:`i` gets
    :math:`a - (a - b)\, i / (n - 1)` tokens with :math:`b = r a` and :math:`(a + b) / 2` the mean, rounded to whole
    tokens so that the sum is exactly ``mean * num_layers``.

    Args:
        mean: tokens per row, head and layer, on average.
        num_layers: how many numbers to return.
        ratio: the last layer's budget over the first layer's, above 0 and at most 1.

    Raises:
        TypeError, ValueError: an argument of another type or range, or a mean that leaves the last layer no token.
    """
    check_count("mean", mean, 1)
    check_count("num_layers", num_layers, 1)
    if isinstance(ratio, bool) or not isinstance(ratio, (int, float)):
        raise TypeError(f"ratio must be a float, got {type(ratio).__name__}")
    if not 0.0 < ratio <= 1.0:
        raise ValueError(f"ratio must be above 0 and at most 1, got {ratio}")
    first = 2.0 * mean / (1.0 + ratio)
    fall = (first - ratio * first) / max(num_layers - 1, 1)
    exact = [first - fall * layer for layer in range(num_layers)] if num_layers > 1 else [mean]
    # Round sums, not budgets: the total is exact, and a budget is at most one token away from the line.
    budgets, total, given = [], 0.0, 0
    for tokens in exact:
        total += tokens
        budgets.append(round(total) - given)
        given += budgets[-1]
    budgets.sort(reverse=True)  # rounding may lift one above its neighbor
    if budgets[-1] < 1:
        raise ValueError(f"mean must leave every layer a token at ratio {ratio}, got {mean}: the last would have none")
    return tuple(budgets)
