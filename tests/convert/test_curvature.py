"""Conversion by curvature: each part against direct computation, whole models, refusals, resuming."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from fastattn import LowRankConfig, to_low_rank_
from fastattn.convert import load_low_rank, save_low_rank
from fastattn.convert.allocation import allocate_globally
from fastattn.convert.curvature import Curvature, directions, fit_curvature, latent_gradients
from fastattn.convert.refit import ridge_refit

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
    model = tiny_model("llama")
    convert(model, LowRankConfig(kv_lora_rank=6, qk_rope_head_dim=8))
    attention = model.model.layers[1].self_attn
    ids = token_ids(1, 3, seed=3)
    weight = attention.kv_a_proj_with_mqa.weight
    probabilities = model(input_ids=ids).logits[0].softmax(-1)
    exact = torch.zeros_like(weight[:6], dtype=torch.float64)
    for position in range(3):
        log = probabilities[position].log()
        for label in range(log.numel()):
            gradient = torch.autograd.grad(log[label], weight, retain_graph=True)[0][:6].double()
            exact += float(probabilities[position, label].detach()) * gradient.square()
    exact /= 3
    sampled = latent_gradients(model, [attention], [ids.expand(1500, -1)], seed=1)[0]
    got = torch.stack(sampled).double()[..., :-1].square().mean(0)
    assert float((got - exact).norm() / exact.norm()) < 0.15


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
    finish, gathered = module.OutputRefit.finish, module.latent_gradients

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
    monkeypatch.setattr(module, "latent_gradients", lambda *a, **k: calls.append(1) or gathered(*a, **k))
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
