"""Conversion by curvature: each part against direct computation, whole models, refusals, resuming."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from fastattn import LowRankConfig, to_low_rank_
from fastattn.convert import load_low_rank, save_low_rank
from fastattn.convert.allocation import allocate_globally
from fastattn.convert.curvature import Curvature, directions, fit_curvature
from fastattn.convert.families import attention_sites, read_weights
from fastattn.convert.gradients import WrittenOutAttention, gather_gradients
from fastattn.convert.joint_allocation import LayerCosts, allocate_jointly, choose_at_price, numbers, pair_counts
from fastattn.convert.refit import ridge_refit
from fastattn.convert.rope_gradient import choose_components, gradient_split, rope_components

pytest.importorskip("transformers")
pytestmark = pytest.mark.transformers

from tests._helpers.tiny_models import logits, tiny_model, token_ids  # noqa: E402

SMALL = LowRankConfig(kv_lora_rank=12, qk_rope_head_dim=8, method="curvature", statistics="parallel")


def convert(model, config, calibration=None, **options):
    calibration = token_ids(6, 30) if calibration is None else calibration
    return to_low_rank_(model, config, calibration, progress=False, **options)


def ranks(report) -> list[int]:
    return [layer.kv_lora_rank for layer in report.layers]


def test_gradients_of_sampled_labels_estimate_the_exact_fisher_information():
    """Exact: the expectation over all labels of the square of one entry's gradient, one position after another."""
    model, ids = tiny_model("llama"), token_ids(1, 3, seed=3)
    site = attention_sites(model)[1]
    weight = site.attention.v_proj.weight.detach().clone().requires_grad_()
    name = f"{site.name}.v_proj.weight"
    log = torch.func.functional_call(model, {name: weight}, (ids,)).logits[0].log_softmax(-1)
    exact = torch.zeros_like(weight, dtype=torch.float64)
    for position in range(3):
        for label in range(log.shape[1]):
            gradient = torch.autograd.grad(log[position, label], weight, retain_graph=True)[0].double()
            exact += float(log[position, label].detach().exp()) * gradient.square()
    exact /= 3
    sampled = gather_gradients(model, [site], [ids.expand(1500, -1)], seed=1)[0].key_value
    got = torch.stack(sampled).double()[:, -len(weight) :, :-1].square().mean(0)
    assert float((got - exact).norm() / exact.norm()) < 0.15
    assert type(site.attention).__name__ == "LlamaAttention"


@pytest.mark.parametrize("family", ["llama-mha", "qwen2", "llama-yarn", "phi3-partial-rotary", "mistral"])
def test_attention_written_out_is_the_models_own(family):
    model = tiny_model(family)
    site, hidden = attention_sites(model)[1], torch.randn(1, 37, 64, generator=torch.Generator().manual_seed(0))
    weights = read_weights(model, site)
    got = WrittenOutAttention(weights, site.attention, with_query=True)(hidden)[0][0]
    expected = weights.attend(hidden[0]).float()
    assert float((got - expected).norm() / expected.norm()) < 1e-5


def test_rope_gradients_are_derivatives_by_a_mixing_of_heads():
    """Adding ``t P k`` to the rotated keys of one frequency, for a complex ``P``, against a finite difference."""
    model, ids = tiny_model("llama", dtype=torch.float64), token_ids(1, 9, seed=2)
    site = attention_sites(model)[0]
    with torch.no_grad():
        gathered = gather_gradients(model, [site], [ids], seed=5)[0]
    generator = torch.Generator().manual_seed(5)
    labels = torch.multinomial(model(input_ids=ids).logits[0].float().softmax(-1), 1, generator=generator)[:, 0]
    weights, frequency = read_weights(model, site), 3
    count, dim = weights.inv_freq.numel(), weights.head_dim
    mixing = torch.randn(2, 2, dtype=torch.complex128, generator=torch.Generator().manual_seed(1))

    def loss(step):
        moved = weights.key[:, :-1].view(2, dim, -1).clone()
        z = torch.complex(moved[:, frequency], moved[:, count + frequency])
        z = z + step * mixing @ z
        moved[:, frequency], moved[:, count + frequency] = z.real, z.imag
        name = f"{site.name}.k_proj.weight"
        logits = torch.func.functional_call(model, {name: moved.flatten(0, 1)}, (ids,)).logits[0]
        return float(torch.nn.functional.cross_entropy(logits, labels, reduction="sum"))

    expected = (loss(1e-2) - loss(-1e-2)) / 2e-2 / 3  # a small step drowns in the norms, which are float32
    got = float((gathered.rotated[0][frequency].conj() * mixing).sum().real)
    assert got == pytest.approx(expected, rel=5e-3)


@pytest.mark.parametrize("chosen", [1, 3, 7])
def test_components_rebuild_the_keys_and_choose_what_costs_most(chosen):
    weights = read_weights(tiny_model("llama"), attention_sites(tiny_model("llama"))[0])
    generator = torch.Generator().manual_seed(0)
    rotated, unrotated = (torch.randn(6, 8, 2, 2, dtype=torch.complex64, generator=generator) for _ in range(2))
    found = rope_components(weights, rotated, unrotated)
    rebuilt = torch.einsum("pgf,phf->fgh", found.dual, found.loading.conj())
    torch.testing.assert_close(rebuilt, torch.eye(2, dtype=torch.complex128).expand(8, 2, 2))
    # half the mean square of what leaving component 5 out changes every sequence's loss by
    mixing = torch.einsum("g,h->gh", found.dual[5, :, 2], found.loading[5, :, 2].conj())
    gained = (unrotated[:, 2].conj() * mixing * found.factor[5]).sum((1, 2))
    change = (gained - (rotated[:, 2].conj() * mixing).sum((1, 2))).real
    assert float(found.cost[5]) == pytest.approx(float(change.square().mean() / 2), rel=1e-6)
    mask = choose_components([found.cost], chosen, shared=False)[0]
    assert set(mask.nonzero()[:, 0].tolist()) == set(found.cost.topk(chosen).indices.tolist())
    moment = torch.eye(65, dtype=torch.float64)
    split = gradient_split(weights, found, mask, moment, 16)
    whole = gradient_split(weights, replace(found, factor=torch.ones_like(found.factor)), mask, moment, 16)
    assert split.kept.shape[0] == 2 * chosen
    torch.testing.assert_close(
        whole.from_kept.T @ whole.kept + whole.from_rest.T @ whole.rest, torch.eye(32, dtype=torch.float64)
    )
    assert split.expected_cost == pytest.approx(float(found.cost[~mask].sum()))


def test_components_are_shared_by_one_threshold_as_brute_force_shares_them():
    costs = [torch.tensor(c) for c in ([9.0, 4.0, 1.0], [0.5, 0.4, 0.3], [8.0, 7.0, 0.2])]
    subsets = [m for n in (1, 2, 3) for m in itertools.combinations(range(3), n)]
    for pairs in (1, 2, 3):
        masks = choose_components(costs, pairs, shared=True)
        best = max(
            sum(float(costs[i][list(m)].sum()) for i, m in enumerate(choice))
            for choice in itertools.product(subsets, repeat=3)
            if sum(map(len, choice)) == 3 * pairs
        )
        assert all(bool(mask.any()) for mask in masks)
        assert sum(float(c[m].sum()) for c, m in zip(costs, masks, strict=True)) == pytest.approx(best)
    with pytest.raises(ValueError, match="qk_rope_head_dim"):
        choose_components(costs, 4, shared=True)


def test_alternating_estimates_find_a_kronecker_product():
    generator = torch.Generator().manual_seed(0)
    left = torch.randn(5, 5, generator=generator, dtype=torch.float64)
    right = torch.randn(7, 7, generator=generator, dtype=torch.float64)
    gradients = [left @ torch.randn(5, 7, generator=generator, dtype=torch.float64) @ right for _ in range(4000)]
    found = fit_curvature(gradients, torch.eye(7, dtype=torch.float64), rounds=5, floor=1e-6)
    expected = torch.kron(left @ left.T, right.T @ right)
    got = torch.kron(found.latent, found.inputs)
    assert float((got - expected).norm() / expected.norm()) < 0.05


def test_directions_cost_what_leaving_them_out_costs_and_no_other_choice_costs_less():
    generator = torch.Generator().manual_seed(0)

    def spd(size):
        root = torch.randn(size, size, generator=generator, dtype=torch.float64)
        return root @ root.T + 0.1 * torch.eye(size, dtype=torch.float64)

    matrix = torch.randn(6, 9, generator=generator, dtype=torch.float64)
    latent, inputs, moment = spd(6), spd(9), spd(9)
    found = directions(matrix, Curvature(latent, inputs), moment)
    a = 0.95 * latent + 0.05 * latent.diagonal().mean() * torch.eye(6, dtype=torch.float64)
    b = 0.8 * inputs + 0.2 * moment * inputs.trace() / moment.trace()

    def cost(approximation):
        lost = matrix - approximation
        return float((a @ lost @ b @ lost.T).trace() / 2)

    for rank in range(7):
        kept = cost(found.up[:, :rank] @ found.down[:rank] @ matrix)
        assert kept == pytest.approx(float(found.cost[rank:].sum()), rel=1e-6, abs=1e-9)
    # Eckart and Young: the least cost of any matrix of that rank, from the Cholesky factors instead of the roots
    singular = torch.linalg.svdvals(torch.linalg.cholesky(a).T @ matrix @ torch.linalg.cholesky(b))
    assert cost(found.up[:, :2] @ found.down[:2] @ matrix) == pytest.approx(float(singular[2:].square().sum() / 2))


def test_global_allocation_is_the_best_of_all():
    spectra = [torch.tensor(s) for s in ([9.0, 4.0, 1.0], [0.5, 0.4, 0.3], [8.0, 7.0, 0.2])]

    def kept(choice):
        return sum(float(s[:r].sum()) for s, r in zip(spectra, choice, strict=True))

    for budget in range(3, 10):
        every = [c for c in itertools.product((1, 2, 3), repeat=3) if sum(c) == budget]
        got = allocate_globally(spectra, budget)
        assert sum(got) == budget
        assert kept(got) == max(map(kept, every))
    for budget in (2, 10):
        with pytest.raises(ValueError, match="sum of ranks"):
            allocate_globally(spectra, budget)


def test_joint_allocation_is_the_best_of_all_that_need_as_few_numbers():
    generator = torch.Generator().manual_seed(0)

    def falling(count):
        return (
            torch.rand(count, generator=generator, dtype=torch.float64).sort(descending=True).values.cumsum(0).flip(0)
        )

    layers = [
        LayerCosts([1, 2, 4], (3 * falling(3)).tolist(), [torch.cat([falling(5), torch.zeros(1)]) for _ in range(3)])
        for _ in range(3)
    ]
    options = [[(i, r) for i in range(3) for r in range(1, 6)] for _ in layers]

    def cost(chosen):
        return sum(layer.rope[i] + float(layer.latent[i][r]) for layer, (i, r) in zip(layers, chosen, strict=True))

    every = [(numbers(layers, c), cost(c), c) for c in itertools.product(*options)]
    for price in (0.01, 0.1, 0.3, 1.0, 3.0):
        chosen = choose_at_price(layers, price)
        needed = numbers(layers, chosen)
        assert cost(chosen) == pytest.approx(min(c for n, c, _ in every if n <= needed))
    for budget in range(9, 40):
        pairs = allocate_jointly(layers, budget)
        left = budget - 2 * sum(pairs)
        assert left >= len(layers)
        # at least as good as any single price that fits, and never over the budget
        fitting = [
            c for n, c, kept in every if n <= budget and [layers[k].pairs[i] for k, (i, _) in enumerate(kept)] == pairs
        ]
        cheapest = min(
            cost(choose_at_price(layers, p))
            for p in (0.3, 1.0, 3.0, 10.0)
            if numbers(layers, choose_at_price(layers, p)) <= budget
        )
        assert min(fitting) <= cheapest + 1e-9
    with pytest.raises(ValueError, match="at least 3 per layer"):
        allocate_jointly(layers, 8)
    assert pair_counts(96)[:7] == [1, 2, 3, 4, 5, 6, 8]
    assert pair_counts(96)[-1] == 96


def test_positions_and_directions_share_their_numbers():
    model, ids = tiny_model("llama"), token_ids(2, 20, seed=1)
    report = convert(model, replace(SMALL, rank_allocation="joint"))
    assert sum(layer.kv_lora_rank + layer.qk_rope_head_dim for layer in report.layers) == 20 * len(report.layers)
    assert torch.isfinite(logits(model, ids)).all()
    for options in ({"kv_lora_rank": None}, {"qk_rope_head_dim": None}, {"rope_selection": "energy"}):
        with pytest.raises(ValueError, match='rank_allocation="joint" needs'):
            replace(SMALL, rank_allocation="joint", **options)


def test_refit_is_the_weighted_least_squares_solution():
    generator = torch.Generator().manual_seed(0)
    u, y = (torch.randn(40, n, generator=generator, dtype=torch.float64) for n in (5, 3))
    w, start = torch.rand(40, 1, generator=generator, dtype=torch.float64), torch.ones(3, 5, dtype=torch.float64)
    gram, cross = (w * u).T @ u, (w * u).T @ y
    pull = float(0.01 * gram.diagonal().mean()) ** 0.5
    rows = torch.cat([w.sqrt() * u, pull * torch.eye(5, dtype=torch.float64)])
    expected = torch.linalg.lstsq(rows, torch.cat([w.sqrt() * y, pull * start.T])).solution.T
    torch.testing.assert_close(ridge_refit(gram, cross, start), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("refit", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_full_rank_and_all_rope_dims_give_the_originals_logits(family, refit):
    model, ids = tiny_model(family), token_ids(2, 40, seed=1)
    expected = logits(model, ids)
    convert(model, replace(SMALL, kv_lora_rank=None, qk_rope_head_dim=None, refit=refit))
    assert float((logits(model, ids) - expected).abs().max() / expected.abs().max()) < 1e-4


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_ranks_per_layer_are_saved_loaded_and_leave_global_random_state_alone(family, tmp_path):
    model, ids = tiny_model(family), token_ids(2, 20, seed=1)
    before = torch.get_rng_state()
    report = convert(model, replace(SMALL, rank_allocation="global", refit=True, q_lora_rank=24))
    assert torch.equal(torch.get_rng_state(), before)
    assert sum(ranks(report)) == 12 * len(report.layers)
    assert len(set(ranks(report))) > 1
    assert all(parameter.grad is None for parameter in model.parameters())
    save_low_rank(model, tmp_path)
    loaded = load_low_rank(tmp_path)
    assert [layer.self_attn.kv_lora_rank for layer in loaded.model.layers] == ranks(report)
    assert torch.equal(logits(loaded, ids), logits(model, ids))


def test_refit_brings_the_residual_stream_closer_to_the_originals():
    ids, streams = token_ids(6, 30), {}
    original = tiny_model("llama").model(ids).last_hidden_state
    for refit in (False, True):
        model = tiny_model("llama")
        convert(model, replace(SMALL, kv_lora_rank=4, refit=refit), ids)
        streams[refit] = float((model.model(ids).last_hidden_state - original).norm())
    assert streams[True] < streams[False]


def test_an_interrupted_conversion_goes_on_from_what_is_there(tmp_path, monkeypatch):
    from fastattn.convert import curvature_conversion as module

    config = replace(SMALL, refit=True, rank_allocation="global")
    expected, model = tiny_model("llama"), tiny_model("llama")
    convert(expected, config)
    finish, gathered = module.OutputRefit.finish, module.gather_curvature

    def interrupted(self, index, *args, **kwargs):
        if index == 1:
            raise KeyboardInterrupt
        return finish(self, index, *args, **kwargs)

    monkeypatch.setattr(module.OutputRefit, "finish", interrupted)
    ids = token_ids(2, 20, seed=1)
    before = logits(model, ids)
    with pytest.raises(KeyboardInterrupt):
        convert(model, config, resume_dir=tmp_path)
    assert torch.equal(logits(model, ids), before)
    monkeypatch.setattr(module.OutputRefit, "finish", finish)
    calls = []
    monkeypatch.setattr(module, "gather_curvature", lambda *a, **k: calls.append(1) or gathered(*a, **k))
    convert(model, config, resume_dir=tmp_path)
    assert not calls
    torch.testing.assert_close(logits(model, ids), logits(expected, ids))


def test_bad_input_is_refused_before_anything_changes():
    model, ids = tiny_model("llama"), token_ids(2, 20, seed=1)
    before = logits(model, ids)
    with pytest.raises(ValueError, match="4 sequences"):
        convert(model, SMALL, token_ids(3, 60))
    with pytest.raises(ValueError, match="one per layer"):
        convert(model, replace(SMALL, kv_lora_rank=None, kv_rank_budget=1))
    assert torch.equal(logits(model, ids), before)
    with pytest.raises(ValueError, match='method="curvature"'):
        LowRankConfig(refit=True)
    with pytest.raises(ValueError, match="rank_allocation"):
        replace(SMALL, rank_allocation="best")
    with pytest.raises(ValueError, match='statistics must be "parallel" or None'):
        replace(SMALL, statistics="sequential")
    for method, statistics in (("curvature", "parallel"), ("loss_optimal", "sequential")):
        assert LowRankConfig(method=method).as_dict()["statistics"] == statistics
    with pytest.raises(TypeError, match="refit"):
        replace(SMALL, refit=1)
    with torch.inference_mode():
        model = tiny_model("llama")
    with pytest.raises(ValueError, match="inference mode"):
        convert(model, SMALL)
