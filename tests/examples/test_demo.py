"""The demo at a small size: every line of its table, and the plot."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("matplotlib", reason="the demo draws with matplotlib, which this environment lacks")

from examples import demo

pytestmark = pytest.mark.transformers


def test_demo_measures_every_policy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plot = tmp_path / "deep" / "demo.png"
    small, large = 32, 400
    results = demo.main(
        ["--prompt", "200", "--following", "8", "--budgets", str(small), str(large), "--out", str(plot)]
    )
    printed = capsys.readouterr().out
    full, others = results[0], results[1:]
    assert full.name == "full cache"
    assert full.retrieved, full.answer
    assert [(r.name, r.budget) for r in others] == [(p, b) for b in (small, large) for p in demo.POLICIES]
    for result in others:
        assert result.name in printed
        assert result.ms_per_token > 0
        if result.budget == large:  # nothing is evicted: the model's own results
            assert result.loss == pytest.approx(full.loss, abs=1e-3)
            assert result.answer == full.answer
        else:
            assert result.loss != pytest.approx(full.loss, abs=1e-3)
            assert not result.retrieved
    # 30 layers, 3 heads, 64 dims of keys and of values in float32, and for slots a position each
    slots = small + 128
    assert others[1].mib == pytest.approx(30 * 3 * slots * (2 * 64 * 4 + 4) / 2**20, rel=0.01)
    assert plot.stat().st_size > 20_000


def test_the_needle_stands_where_it_should() -> None:
    from examples import smollm2

    tokenizer = smollm2.load_tokenizer()
    material = demo.make_material(tokenizer, 300, 20, depth=0.5)
    assert material.prompt.shape == (1, 300)
    assert material.following.shape == (1, 20)
    whole = tokenizer.decode(material.prompt[0])
    before, needle, after = whole.partition(demo.NEEDLE)
    assert needle
    assert (
        before + after + tokenizer.decode(material.following[0])
        == smollm2.long_text()[: len(before + after) + len(tokenizer.decode(material.following[0]))]
    )
    assert 0.3 < len(before) / len(whole) < 0.7
