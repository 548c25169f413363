"""Stored prefixes and the continuations that are scored from them."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys

import pytest
import torch

pytest.importorskip("transformers")

from fastattn import CompressedKVCache, Policy, to_low_rank_
from fastattn.convert import LowRankConfig
from fastattn.integrations.transformers import (
    compressed_cache,
    load_prefix,
    prefill,
    save_prefix,
    score_continuations,
)
from tests._helpers.hf_models import make_model
from tests._helpers.tiny_models import token_ids

pytestmark = [pytest.mark.transformers, pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")]

LENGTHS = (1, 7, 2, 12, 1, 5)
PREFIX = token_ids(1, 40, seed=3)
CONTINUATIONS = [token_ids(1, length, seed=10 + i)[0] for i, length in enumerate(LENGTHS)]
BUDGETS = {"nothing is evicted": 64, "with eviction": 16}


@pytest.fixture(scope="module")
def model():
    return make_model("llama").double()


def fed(model, budget=16, policy="knorm", **options):
    """A cache that holds ``PREFIX``, compressed."""
    cache = compressed_cache(model, policy, budget, interval=4, **options)
    prefill(model, PREFIX, cache, chunk_size=15, progress=False)
    return cache


def whole_text_scores(model, continuation):
    """Log-likelihoods of the whole text's last tokens, without any cache."""
    text = torch.cat([PREFIX, continuation[None]], 1)
    with torch.no_grad():
        logits = model(text, use_cache=False).logits[0].double().log_softmax(-1)
    return logits[PREFIX.shape[1] - 1 : -1].gather(1, continuation[:, None])[:, 0]


def one_by_one(model, cache, continuation):
    """The same from a compressed prefix: one call with all tokens but the last, over a copy."""
    first = cache.next_logits[0]
    logits = [first]
    if len(continuation) > 1:
        copied = cache.fork(torch.tensor([0]))
        with torch.no_grad():
            logits += list(model(continuation[None, :-1], past_key_values=copied).logits[0])
    rows = torch.stack(logits).double().log_softmax(-1)
    greedy = bool((rows.argmax(1) == continuation).all())
    return rows.gather(1, continuation[:, None])[:, 0], greedy


@pytest.mark.parametrize("family", ["llama", "qwen2_windows", "gemma3", "low rank"])
def test_without_eviction_a_score_is_the_whole_texts(family):
    model = make_model("llama" if family == "low rank" else family).double()
    if family == "low rank":
        config = LowRankConfig(kv_lora_rank=24, qk_rope_head_dim=8)
        to_low_rank_(model, config, calibration=token_ids(8, 32), progress=False)
    cache = fed(model, budget=64)
    expected = [whole_text_scores(model, continuation) for continuation in CONTINUATIONS]
    for chunk_size in (None, 3, 1):
        options = {"batch_size": 4, "chunk_size": chunk_size, "progress": False}
        for score, own in zip(score_continuations(model, cache, CONTINUATIONS, **options), expected, strict=True):
            torch.testing.assert_close(score.token_log_likelihoods, own, rtol=0, atol=1e-9)
            assert score.log_likelihood == pytest.approx(float(own.sum()), abs=1e-9)


@pytest.mark.parametrize("policy", ["knorm", "expected_attention", "h2o"])
@pytest.mark.parametrize("max_step", [1, 3])
def test_with_eviction_a_score_depends_on_no_other_continuation(model, policy, max_step):
    cache = fed(model, policy=policy, max_step=max_step)
    assert int(cache.kv.lengths(0).max()) == 16
    # Likeliest tokens, for is_greedy: a chain that the model itself would write.
    chain = [int(cache.next_logits[0].argmax())]
    for _ in range(4):
        with torch.no_grad():
            ids = torch.tensor([chain + [0] * (max_step + 1 - len(chain))])  # a call that is no decode step
            chain.append(
                int(model(ids, past_key_values=cache.fork(torch.tensor([0]))).logits[0, len(chain) - 1].argmax())
            )
    continuations = [*CONTINUATIONS, torch.tensor(chain)]
    before = {name: buffer.clone() for name, buffer in cache.kv.named_buffers()}
    runs = [score_continuations(model, cache, continuations, batch_size=n, progress=False) for n in (1, 4, 16)]
    for index, continuation in enumerate(continuations):
        if len(continuation) == 1 or len(continuation) - 1 > max_step:
            expected, greedy = one_by_one(model, cache, continuation)
        else:
            expected, greedy = runs[0][index].token_log_likelihoods, runs[0][index].is_greedy
        for run in runs:
            torch.testing.assert_close(run[index].token_log_likelihoods, expected, rtol=0, atol=1e-9)
            assert run[index].is_greedy is greedy
    assert runs[0][-1].is_greedy
    assert not runs[0][0].is_greedy
    for name, buffer in cache.kv.named_buffers():
        assert torch.equal(buffer, before[name]), name
    assert cache.next_logits is not None


def test_a_full_prefix_that_ends_in_decode_steps_is_scored_alike_in_every_batch(model):
    """A decode step would first compress what is full: the score of two tokens must not depend on a longer neighbor."""
    cache = fed(model)
    while int(cache.kv.lengths(0).max()) < 20:
        with torch.no_grad():
            logits = model(token_ids(1, 1), past_key_values=cache).logits[:, -1]
    short, long = CONTINUATIONS[2], CONTINUATIONS[3]
    alone = score_continuations(model, cache, [short], next_logits=logits[0])
    beside = score_continuations(model, cache, [short, long], next_logits=logits)
    torch.testing.assert_close(alone[0].token_log_likelihoods, beside[0].token_log_likelihoods, rtol=0, atol=1e-9)


def test_chunks_of_a_continuation_are_compressed_before_the_next_comes(model):
    cache = fed(model)
    options = {"chunk_size": 4, "progress": False}
    together = score_continuations(model, cache, CONTINUATIONS, batch_size=8, **options)
    for score, continuation in zip(together, CONTINUATIONS, strict=True):
        (alone,) = score_continuations(model, cache, [continuation], **options)
        torch.testing.assert_close(score.token_log_likelihoods, alone.token_log_likelihoods, rtol=0, atol=1e-9)
    copied, logits = cache.fork(torch.tensor([0])), [cache.next_logits]
    with torch.no_grad():
        for chunk in CONTINUATIONS[3][None, :-1].split(4, dim=1):
            logits.append(model(chunk, past_key_values=copied).logits[0])
    expected = torch.cat(logits).log_softmax(-1).gather(1, CONTINUATIONS[3][:, None])[:, 0]
    torch.testing.assert_close(together[3].token_log_likelihoods, expected, rtol=0, atol=1e-9)
    whole = score_continuations(model, cache, CONTINUATIONS, progress=False)[3]
    assert abs(whole.log_likelihood - together[3].log_likelihood) > 1e-6  # there were evictions in between


def test_a_stored_prefix_goes_on_exactly(model, tmp_path):
    cache = fed(model, policy="expected_attention")
    save_prefix(cache, tmp_path / "prefix")
    loaded = load_prefix(model, tmp_path / "prefix")
    assert torch.equal(loaded.next_logits, cache.next_logits)
    expected = score_continuations(model, cache, CONTINUATIONS)
    for score, other in zip(score_continuations(model, loaded, CONTINUATIONS), expected, strict=True):
        assert torch.equal(score.token_log_likelihoods, other.token_log_likelihoods)
    three = load_prefix(model, tmp_path / "prefix", batch_size=3)
    assert three.next_logits.shape == (3, 100)
    text = torch.cat([PREFIX, token_ids(1, 3)], 1)
    options = {"max_new_tokens": 12, "do_sample": False}
    alone = model.generate(text, attention_mask=torch.ones_like(text), past_key_values=cache, **options)
    text = text.expand(3, -1)
    many = model.generate(text, attention_mask=torch.ones_like(text), past_key_values=three, **options)
    assert torch.equal(many, alone.expand(3, -1))
    assert three.next_logits is None  # what was fed since says something else


OTHER_PROCESS = """
import json, sys, torch
from fastattn.integrations.transformers import load_prefix, score_continuations
from tests._helpers.hf_models import make_model
from tests.integrations.test_prefixes import CONTINUATIONS
model = make_model("llama").double()
scores = score_continuations(model, load_prefix(model, sys.argv[1]), CONTINUATIONS, progress=False)
print(json.dumps([score.log_likelihood for score in scores]))
"""


def test_another_process_scores_from_the_file(model, tmp_path):
    cache = fed(model)
    save_prefix(cache, tmp_path / "prefix")
    command = [sys.executable, "-c", OTHER_PROCESS, str(tmp_path / "prefix")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    expected = [score.log_likelihood for score in score_continuations(model, cache, CONTINUATIONS)]
    assert json.loads(result.stdout.splitlines()[-1]) == expected


def test_files_of_other_models_and_damaged_ones_are_refused(model, tmp_path):
    path = tmp_path / "prefix"
    cache = fed(model)
    save_prefix(cache, path)
    whole = path.read_bytes()

    other = make_model("llama").double()
    load_prefix(other, path)  # the same weights in another object
    with torch.no_grad():
        other.model.layers[1].self_attn.v_proj.weight[3, 3] += 1e-6
    with pytest.raises(ValueError, match=r"model must be the one that computed .*: it was saved with weights"):
        load_prefix(other, path)
    with pytest.raises(ValueError, match=r"saved with configuration .*; weights"):
        load_prefix(make_model("llama", rms_norm_eps=1e-5, num_hidden_layers=3).double(), path)
    with pytest.raises(ValueError, match="saved with class LlamaModel, got Qwen2Model"):
        load_prefix(make_model("qwen2").double(), path)
    with pytest.raises(ValueError, match="saved with weights"):
        load_prefix(make_model("llama"), path)  # the same in float32 has other keys

    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="truncated or damaged"):
        load_prefix(model, path)
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(ValueError, match="its hash differs"):
        load_prefix(model, path)
    cache.kv.save(path, fingerprint="by hand")
    with pytest.raises(ValueError, match=r"must be a file that save_prefix wrote, got .* 'by hand'"):
        load_prefix(model, path)
    with pytest.raises(ValueError, match="which is none"):
        load_prefix(model, tmp_path / "missing")
    path.write_bytes(whole)
    assert CompressedKVCache.load(path).tokens_seen.tolist() == [40]  # it is a cache's file


class OnesOwn(Policy):
    def score(self, state):
        return state.positions.double()


def test_several_rows_and_a_policy_of_ones_own(model, tmp_path):
    cache = compressed_cache(model, OnesOwn(), 16, interval=4)
    prefill(model, token_ids(2, 30), cache)
    save_prefix(cache, tmp_path / "two")
    with pytest.raises(ValueError, match="policy must be given to load"):
        load_prefix(model, tmp_path / "two", None)
    with pytest.raises(ValueError, match="batch_size must be 2, or the file hold one row"):
        load_prefix(model, tmp_path / "two", policy=OnesOwn())
    loaded = load_prefix(model, tmp_path / "two", None, policy=OnesOwn())
    assert loaded.kv.tokens_seen.tolist() == [30, 30]
    with pytest.raises(ValueError, match="prefix must have one row, got 2"):
        score_continuations(model, loaded, CONTINUATIONS)


def test_what_cannot_be_saved(model, tmp_path):
    windows = make_model("qwen2_windows")
    with pytest.raises(ValueError, match="got one with sliding windows"):
        save_prefix(compressed_cache(windows, "knorm", 16), tmp_path / "file")
    with pytest.raises(TypeError, match="cache must come from compressed_cache or load_prefix, got str"):
        save_prefix("cache", tmp_path / "file")
    cache = fed(model)
    with pytest.raises(ValueError, match="its model exists"):
        save_prefix(pickle.loads(pickle.dumps(cache)), tmp_path / "file")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("continuations", "error", "message"),
    [
        ("text", TypeError, "continuations must be a sequence of sequences of token ids, got str"),
        (torch.zeros(2, 3, dtype=torch.int64), TypeError, "continuations must be a sequence of sequences"),
        ([[1], "text"], TypeError, r"continuations\[1\] must be a sequence of token ids, got str"),
        ([[1], []], ValueError, r"continuations\[1\] must hold at least one token"),
        ([[1.0]], TypeError, r"continuations\[0\] must hold integers, got float"),
        ([[True]], TypeError, r"continuations\[0\] must hold integers, got bool"),
        ([torch.zeros(3)], ValueError, r"continuations\[0\] must be integers \[T\], got \[3\] torch.float32"),
        ([torch.zeros(1, 3, dtype=torch.int64)], ValueError, r"must be integers \[T\], got \[1, 3\]"),
        ([[1], [5, 100]], ValueError, r"continuations\[1\] must hold ids in 0\.\.99, got 5\.\.100"),
        ([[-1]], ValueError, r"continuations\[0\] must hold ids in 0\.\.99, got -1\.\.-1"),
    ],
)
def test_wrong_continuations(model, continuations, error, message):
    with pytest.raises(error, match=message):
        score_continuations(model, fed(model), continuations)


def test_wrong_prefixes(model):
    cache = fed(model)
    assert score_continuations(model, cache, []) == []
    with pytest.raises(TypeError, match="prefix must come from compressed_cache or load_prefix, got CompressedKVCache"):
        score_continuations(model, cache.kv, [[1]])
    with pytest.raises(ValueError, match="prefix must hold at least one token"):
        score_continuations(model, compressed_cache(model), [[1]])
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        score_continuations(model, cache, [[1]], batch_size=0)
    with pytest.raises(ValueError, match="chunk_size must be at least 1, got 0"):
        score_continuations(model, cache, [[1]], chunk_size=0)
    with pytest.raises(ValueError, match="model must be the one that prefix was made for"):
        score_continuations(make_model("llama").double(), cache, [[1]])
    with pytest.raises(ValueError, match=r"next_logits must be floats \[vocabulary\], got \[2, 100\]"):
        score_continuations(model, cache, [[1]], next_logits=torch.zeros(2, 100))
    with pytest.raises(TypeError, match="next_logits must be a tensor, got list"):
        score_continuations(model, cache, [[1]], next_logits=[0.0])
    with torch.no_grad():
        model(token_ids(1, 1), past_key_values=cache)
    with pytest.raises(ValueError, match="next_logits must be given where prefix was not fed with prefill last"):
        score_continuations(model, cache, [[1]])
