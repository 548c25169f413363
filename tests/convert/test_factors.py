"""The linear algebra of a conversion, on one random layer, without a model."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastattn.convert.factors import allocate_ranks, build_factors, output_error, project, stack_key_value
from fastattn.convert.rope import split_rope
from fastattn.convert.statistics import SecondMoment
from fastattn.convert.weights import AttentionWeights
from tests._helpers.low_rank_reference import latent_attention

HIDDEN = 40


def random_layer(
    *, seed=0, heads=6, kv_heads=3, dim=16, v_dim=16, pairs=8, bias=True, attention_factor=1.0
) -> AttentionWeights:
    generator = torch.Generator().manual_seed(seed)

    def rows(count: int, inputs: int, with_bias: bool) -> torch.Tensor:
        weight = torch.randn(count, inputs, generator=generator, dtype=torch.float64) / inputs**0.5
        column = torch.randn(count, 1, generator=generator, dtype=torch.float64) * with_bias
        return torch.cat([weight, column], dim=1)

    return AttentionWeights(
        query=rows(heads * dim, HIDDEN, bias),
        key=rows(kv_heads * dim, HIDDEN, bias),
        value=rows(kv_heads * v_dim, HIDDEN, bias),
        output=rows(HIDDEN, heads * v_dim, False),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        v_head_dim=v_dim,
        inv_freq=100.0 ** -(torch.arange(pairs) / pairs),
        scale=0.3,
        attention_factor=attention_factor,
        query_bias=bias,
        kv_bias=bias,
    )


def inputs_and_moment(seed: int = 1, tokens: int = 300) -> tuple[torch.Tensor, torch.Tensor]:
    """Correlated inputs, so that the data's directions differ from the weights'."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(HIDDEN, HIDDEN, generator=generator, dtype=torch.float64)
    mixing = mixing * torch.logspace(0, -2, HIDDEN, dtype=torch.float64)
    inputs = torch.randn(tokens, HIDDEN, generator=generator, dtype=torch.float64) @ mixing.T + 0.3
    moment = SecondMoment(HIDDEN)
    for chunk in inputs.split(77):
        moment.add(chunk)
    return inputs, moment.mean()


def test_second_moment_streams_like_one_pass():
    inputs, mean = inputs_and_moment()
    extended = torch.cat([inputs, torch.ones(len(inputs), 1, dtype=torch.float64)], dim=1)
    torch.testing.assert_close(mean, extended.T @ extended / len(inputs), rtol=1e-12, atol=1e-12)


def test_second_moment_refuses_nan_and_keeps_its_sum():
    moment = SecondMoment(3)
    moment.add(torch.ones(2, 3))
    before = moment.mean()
    with pytest.raises(ValueError, match="finite"):
        moment.add(torch.tensor([[1.0, float("nan"), 0.0]]))
    assert torch.equal(moment.mean(), before)


def test_second_moment_refuses_no_tokens():
    with pytest.raises(ValueError, match="at least one token"):
        SecondMoment(3).mean()


def test_damping_raises_the_inputs_diagonal_only():
    _, plain = inputs_and_moment()
    moment = SecondMoment(HIDDEN)
    moment.add(inputs_and_moment()[0])
    added = moment.mean(damping=0.5) - plain
    expected = torch.eye(HIDDEN + 1, dtype=torch.float64) * plain.diagonal()[:-1].mean() * 0.5
    expected[-1, -1] = 0
    torch.testing.assert_close(added, expected, rtol=1e-9, atol=1e-12)


@settings(max_examples=25, deadline=None)
@given(
    kv_heads=st.sampled_from([1, 2, 3]),
    group=st.sampled_from([1, 2, 3]),
    pairs=st.sampled_from([2, 4, 8]),
    v_dim=st.sampled_from([8, 16, 24]),
    bias=st.booleans(),
    low_rank_query=st.booleans(),
    attention_factor=st.sampled_from([1.0, 1.3]),
    seed=st.integers(0, 5),
)
def test_full_rank_and_all_rope_dims_reproduce_the_layer(
    kv_heads, group, pairs, v_dim, bias, low_rank_query, attention_factor, seed
):
    layer = random_layer(
        seed=seed, heads=kv_heads * group, kv_heads=kv_heads, pairs=pairs, v_dim=v_dim, bias=bias,
        attention_factor=attention_factor,
    )  # fmt: skip
    inputs, moment = inputs_and_moment(tokens=60)
    q_rank = layer.query.shape[0] if low_rank_query else None
    factors = build_factors(layer, split_rope(layer, moment, None), moment, kv_rank=None, q_rank=q_rank)
    assert factors.arguments["qk_rope_head_dim"] == layer.max_rope_dim
    columns = inputs.shape[1] + bias  # no more directions than the input has
    assert factors.arguments["kv_lora_rank"] == min(layer.cached_values - layer.max_rope_dim, columns)
    got = latent_attention(factors.state, factors.arguments, factors.inv_freq, inputs, layer.num_heads)
    torch.testing.assert_close(got, layer.attend(inputs), rtol=1e-9, atol=1e-9)
    assert max(factors.errors.values()) < 1e-7


@pytest.mark.parametrize("mixing", ["real", "complex"])
@pytest.mark.parametrize("selection", ["energy", "uniform"])
@pytest.mark.parametrize("fold", [1, 2, "search"])
def test_split_is_orthogonal_and_exact_where_no_position_turns(fold, selection, mixing):
    layer = dataclasses.replace(random_layer(), inv_freq=torch.zeros(8))
    inputs, moment = inputs_and_moment(tokens=60)
    split = split_rope(layer, moment, 16, fold=fold, selection=selection, mixing=mixing)
    basis = torch.cat([split.kept, split.rest])
    torch.testing.assert_close(basis @ basis.T, torch.eye(48, dtype=torch.float64), rtol=0, atol=1e-12)
    factors = build_factors(layer, split, moment, kv_rank=None, q_rank=None)
    got = latent_attention(factors.state, factors.arguments, factors.inv_freq, inputs, layer.num_heads)
    torch.testing.assert_close(got, layer.attend(inputs), rtol=1e-9, atol=1e-9)


def test_folding_is_exact_where_neighboring_frequencies_are_equal():
    layer = dataclasses.replace(random_layer(kv_heads=1, heads=2), inv_freq=torch.tensor([0.4] * 4 + [0.0] * 4))
    # keys live in two of the four folded pairs, so that two pairs hold every rotated dim
    key = layer.key.clone()
    key[2:4], key[10:12] = key[:2] * 0.5, key[8:10] * 0.5
    layer = dataclasses.replace(layer, key=key)
    inputs, moment = inputs_and_moment(tokens=60)
    split = split_rope(layer, moment, 4, fold=4)
    assert split.expected_error < 1e-12
    factors = build_factors(layer, split, moment, kv_rank=None, q_rank=None)
    got = latent_attention(factors.state, factors.arguments, factors.inv_freq, inputs, 2)
    torch.testing.assert_close(got, layer.attend(inputs), rtol=1e-6, atol=1e-6)


def test_heads_that_share_keys_need_one_rope_head():
    """The concentration finds identical heads, in phase or not: one head's rope dims then hold everything."""
    layer = random_layer(kv_heads=2, heads=4, bias=False)
    key = layer.key.clone()
    key[16:24], key[24:] = -key[8:16], key[:8]  # second head: the first, every pair rotated by a right angle
    layer = dataclasses.replace(layer, key=key)
    inputs, moment = inputs_and_moment(tokens=60)
    complex_split = split_rope(layer, moment, 16, fold=1, mixing="complex")
    assert complex_split.energy_kept > 1 - 1e-12
    assert split_rope(layer, moment, 16, fold=1, mixing="real").energy_kept < 0.95
    factors = build_factors(layer, complex_split, moment, kv_rank=None, q_rank=None)
    got = latent_attention(factors.state, factors.arguments, factors.inv_freq, inputs, 4)
    torch.testing.assert_close(got, layer.attend(inputs), rtol=1e-6, atol=1e-6)


def test_complex_mixing_keeps_at_least_as_much_energy_as_real():
    for seed in range(5):
        layer, (_, moment) = random_layer(seed=seed), inputs_and_moment(seed)
        kept = [
            split_rope(layer, moment, 16, fold=1, selection="uniform", mixing=mixing).energy_kept
            for mixing in ("real", "complex")
        ]
        assert kept[1] >= kept[0] - 1e-12


def test_searching_the_fold_is_never_worse_than_any_fold():
    layer, (_, moment) = random_layer(), inputs_and_moment()
    best = split_rope(layer, moment, 12, fold="search").expected_error
    assert best == pytest.approx(min(split_rope(layer, moment, 12, fold=m).expected_error for m in (1, 2, 4, 8)))


def test_uniform_selection_gives_evenly_spaced_frequencies():
    layer, (_, moment) = random_layer(), inputs_and_moment()
    one_head = split_rope(layer, moment, 16, fold=1, selection="uniform").inv_freq
    assert torch.equal(one_head, layer.inv_freq)
    half_head = split_rope(layer, moment, 8, fold=2, selection="uniform").inv_freq
    assert torch.equal(half_head, layer.inv_freq[::2])


@pytest.mark.parametrize(
    ("rope_dim", "options", "message"),
    [
        (50, {}, "qk_rope_head_dim must be at most 48"),
        (16, {"fold": 3}, "freq_fold must divide the 8"),
        (10, {"fold": 1, "selection": "uniform"}, "evenly"),
        (46, {"fold": 1, "selection": "uniform"}, "evenly"),
    ],
)
def test_split_refuses_what_does_not_fit(rope_dim, options, message):
    _, moment = inputs_and_moment()
    with pytest.raises(ValueError, match=message):
        split_rope(random_layer(), moment, rope_dim, **options)


@pytest.mark.parametrize(("kv_rank", "q_rank", "name"), [(81, None, "kv_lora_rank"), (8, 97, "q_lora_rank")])
def test_factors_refuse_ranks_above_the_layer(kv_rank, q_rank, name):
    layer, (_, moment) = random_layer(), inputs_and_moment()
    with pytest.raises(ValueError, match=name):
        build_factors(layer, split_rope(layer, moment, 16), moment, kv_rank=kv_rank, q_rank=q_rank)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 1000), rope_dim=st.sampled_from([8, 16, 48]), bias=st.booleans())
def test_joint_error_falls_with_rank_and_loss_optimal_beats_plain_svd(seed, rope_dim, bias):
    layer, (_, moment) = random_layer(seed=seed, bias=bias), inputs_and_moment(seed + 1)
    split = split_rope(layer, moment, rope_dim)
    full = stack_key_value(layer, split, moment).matrix.shape[0]
    errors = {
        method: [
            build_factors(layer, split, moment, kv_rank=rank, q_rank=rank, method=method).errors
            for rank in (1, 3, 8, 20, full)
        ]
        for method in ("loss_optimal", "plain_svd")
    }
    for series in errors.values():
        for name in ("joint", "query"):
            assert all(a[name] >= b[name] - 1e-9 for a, b in itertools.pairwise(series))
    for optimal, plain in zip(errors["loss_optimal"], errors["plain_svd"], strict=True):
        assert optimal["joint"] <= plain["joint"] + 1e-9
        assert optimal["query"] <= plain["query"] + 1e-9


def test_kept_energies_are_what_the_error_lacks():
    layer, (_, moment) = random_layer(), inputs_and_moment()
    whole = float(((layer.value @ moment) * layer.value).sum())
    for rank in (1, 5, 20):
        projection = project(layer.value, moment, rank, "loss_optimal")
        error = output_error(layer.value, projection.up @ projection.down, moment)
        assert error**2 * whole == pytest.approx(float(projection.kept[rank:].sum()), rel=1e-6)


def test_allocation_spends_the_budget_where_it_helps_most():
    spectra = [torch.tensor([8.0, 1.0, 1.0]), torch.tensor([40.0, 30.0, 20.0, 10.0])]
    assert allocate_ranks(spectra, 4) == [1, 3]
    assert allocate_ranks(spectra, 7) == [3, 4]
    for budget in (1, 8):
        with pytest.raises(ValueError, match="kv_rank_budget"):
            allocate_ranks(spectra, budget)


def test_constant_and_zero_inputs_convert_without_nan():
    layer = random_layer(bias=False)
    for fill in (0.0, 1.0):
        moment = SecondMoment(HIDDEN)
        moment.add(torch.full((9, HIDDEN), fill))
        split = split_rope(layer, moment.mean(), 16)
        factors = build_factors(layer, split, moment.mean(), kv_rank=8, q_rank=8)
        assert all(bool(torch.isfinite(value).all()) for value in factors.state.values())
        assert all(error == error for error in factors.errors.values())
