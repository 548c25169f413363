"""Caches in files: what is loaded goes on exactly as what was saved."""

from __future__ import annotations

import json
import os

import pytest
import torch

from fastattn import CompressedKVCache, KeyDiff, Policy, StreamingLLM
from fastattn.modules import policy_names
from tests.modules.test_kv_cache_rows import LAYERS, assert_rows_equal, drawn, feed, make, row_state

safetensors = pytest.importorskip("safetensors.torch", reason="saving caches needs safetensors")
POLICIES = policy_names()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("count", [0, 9, 40])
def test_a_loaded_cache_goes_on_as_the_saved_one(tmp_path, policy, count):
    cache = make(policy, rows=2)
    if count:
        feed(cache, drawn(2, count, 0))
    path = tmp_path / "prefix.safetensors"
    cache.save(path)
    loaded = CompressedKVCache.load(path)
    assert repr(loaded.policy) == repr(cache.policy)
    assert (loaded.budget, loaded.dtype, int(loaded.columns)) == (cache.budget, cache.dtype, int(cache.columns))
    for step in range(12):
        new = drawn(2, 1, 5 + step)
        for ours, theirs in zip(feed(loaded, new), feed(cache, new), strict=True):
            assert torch.equal(ours, theirs)
    for row in range(2):
        assert_rows_equal(row_state(loaded, row), row_state(cache, row))
    assert os.listdir(tmp_path) == [path.name]  # no temporary file is left


def test_the_file_is_cut_to_what_is_filled(tmp_path):
    small, large = make(budget=1000, rows=1), make(budget=100_000, rows=1)
    for cache in (small, large):
        feed(cache, drawn(1, 30, 0))
        cache.save(tmp_path / f"{cache.budget}")
    assert abs((tmp_path / "1000").stat().st_size - (tmp_path / "100000").stat().st_size) < 100


def test_one_saved_row_can_be_repeated(tmp_path):
    cache = make("expected_attention", rows=1)
    feed(cache, drawn(1, 40, 0))
    cache.save(tmp_path / "one")
    many = CompressedKVCache.load(tmp_path / "one", batch_size=3)
    for row in range(3):
        assert_rows_equal(row_state(many, row), row_state(cache, 0))
    new = drawn(1, 1, 7)
    out = feed(many, [tuple(part.expand(3, -1, -1, -1) for part in layer) for layer in new])
    expected = feed(cache, new)
    for layer in range(LAYERS):
        torch.testing.assert_close(out[layer], expected[layer].expand(3, -1, -1, -1), rtol=0, atol=1e-12)
    two = make(rows=2)
    two.save(tmp_path / "two")
    with pytest.raises(ValueError, match="batch_size must be 2, or the file hold one row to be repeated, got 3"):
        CompressedKVCache.load(tmp_path / "two", batch_size=3)


def test_budgets_per_layer_options_latents_and_another_dtype_survive(tmp_path):
    cache = make(KeyDiff(n_sink=2, n_recent=3), (20, 7), rows=1)
    feed(cache, drawn(1, 40, 0))
    cache.save(tmp_path / "file")
    loaded = CompressedKVCache.load(tmp_path / "file", dtype=torch.float32)
    assert loaded.budget == (20, 7)
    assert repr(loaded.policy) == "KeyDiff(n_recent=3, n_sink=2)"
    assert loaded.keys(0).dtype == torch.float32
    torch.testing.assert_close(loaded.keys(1)[:, :, :7].double(), cache.keys(1)[:, :, :7], rtol=1e-6, atol=1e-6)
    latent = CompressedKVCache("knorm", 8, num_layers=1, num_kv_heads=1, head_dim=12, latent_rank=8, interval=2)
    latent.attend(0, torch.randn(1, 4, 20, 12), torch.randn(1, 1, 20, 12), scale=1.0)
    latent.save(tmp_path / "latent")
    again = CompressedKVCache.load(tmp_path / "latent")
    assert again.latent_rank == 8
    assert torch.equal(again.keys(0)[:, :, :8], latent.keys(0)[:, :, :8])


class OnesOwn(Policy):
    def score(self, state):
        return state.positions.double()


def test_a_policy_of_ones_own_is_given_when_loading(tmp_path):
    cache = make(OnesOwn(), rows=1)
    feed(cache, drawn(1, 30, 0))
    cache.save(tmp_path / "file")
    with pytest.raises(ValueError, match=r"policy must be given to load .*: it was saved with a OnesOwn"):
        CompressedKVCache.load(tmp_path / "file")
    loaded = CompressedKVCache.load(tmp_path / "file", policy=OnesOwn())
    assert_rows_equal(row_state(loaded, 0), row_state(cache, 0))


def test_files_that_are_not_what_they_should_be(tmp_path):
    cache = make(StreamingLLM(2), rows=1)
    feed(cache, drawn(1, 30, 0))
    path = tmp_path / "file"
    cache.save(path, fingerprint="model A")
    whole = path.read_bytes()
    with pytest.raises(ValueError, match=r"fingerprint must be .* 'model A', got 'model B'"):
        CompressedKVCache.load(path, fingerprint="model B")
    assert CompressedKVCache.load(path, fingerprint="model A").tokens_seen.tolist() == [30]
    with pytest.raises(ValueError, match="which is none"):
        CompressedKVCache.load(tmp_path / "missing")
    with pytest.raises(TypeError, match="fingerprint must be a string, got int"):
        cache.save(path, fingerprint=3)

    path.write_bytes(whole[:-8])
    with pytest.raises(ValueError, match="truncated or damaged"):
        CompressedKVCache.load(path)
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(ValueError, match="does not hold what was saved: its hash differs"):
        CompressedKVCache.load(path)
    safetensors.save_file({"keys": torch.zeros(2)}, path)
    with pytest.raises(ValueError, match=r"must be a file that CompressedKVCache\.save wrote"):
        CompressedKVCache.load(path)

    path.write_bytes(whole)
    with safetensors.safe_open(str(path), framework="pt") as file:
        metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    safetensors.save_file(tensors, path, metadata={**metadata, "version": "99"})
    with pytest.raises(ValueError, match="format version 2 or older, got version 99"):
        CompressedKVCache.load(path)
    header = json.loads(metadata["header"])
    header["arguments"]["budget"] = 12
    safetensors.save_file(tensors, path, metadata={**metadata, "header": json.dumps(header)})
    with pytest.raises(ValueError, match="its hash differs"):
        CompressedKVCache.load(path)


def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    cache = make(rows=1)
    feed(cache, drawn(1, 30, 0))
    path = tmp_path / "file"
    cache.save(path)
    before = path.read_bytes()

    def fail(*args, **kwargs):
        raise OSError("no space left")

    monkeypatch.setattr(safetensors, "save_file", fail)
    with pytest.raises(OSError, match="no space left"):
        cache.save(path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["file"]


def test_a_cache_that_stopped_half_way_is_not_saved(tmp_path):
    cache = make(rows=1)
    cache.attend(0, *drawn(1, 4, 0)[0])
    with pytest.raises(RuntimeError, match="stopped before layer 1"):
        cache.save(tmp_path / "file")
