"""`generate` over a compressed cache: a full cache's tokens within the budget, each row alone beyond it."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from transformers import DynamicCache

from fastattn.integrations.transformers import compressed_cache, prefill
from fastattn.modules import policy_names
from tests._helpers.budget import assert_within_budget
from tests._helpers.hf_models import FAMILIES, distinct_tokens, make_model, ragged_prompt
from tests._helpers.policy_caches import small

pytestmark = [pytest.mark.transformers, pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")]

POLICIES = policy_names()


def greedy(model, ids, tokens=12, **kwargs):
    return model.generate(ids, max_new_tokens=tokens, do_sample=False, **kwargs)


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_evicted_gives_the_tokens_of_the_default_cache(family):
    model = make_model(family)
    ids, mask = ragged_prompt()
    expected = greedy(model, ids, attention_mask=mask)
    expected_first = greedy(model, ids[:1])
    cache = compressed_cache(model, "key_diff", 128, batch_size=3)
    assert torch.equal(greedy(model, ids, attention_mask=mask, past_key_values=cache), expected)
    assert cache.kv.tokens_seen.tolist() == [51, 38, 25]
    single = compressed_cache(model, "expected_attention", 128)
    assert torch.equal(greedy(model, ids[:1], past_key_values=single), expected_first)
    # The tokens depend on the text, so that equal tokens mean something.
    assert len(set(expected_first[0, 40:].tolist())) > 4


@pytest.mark.parametrize("family", ["llama", "smollm3", "gpt_oss"])
def test_padding_between_the_tokens_of_a_row(family):
    model = make_model(family)
    ids, mask = ragged_prompt()
    mask[0, 7:9] = mask[1, 20] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        expected = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
        cache = compressed_cache(model, "key_diff", 128, batch_size=3)
        logits = model(ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True).logits
    assert cache.kv.tokens_seen.tolist() == [38, 26, 14]
    torch.testing.assert_close(logits[mask.bool()], expected[mask.bool()], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("family", ["llama", "llama_eager", "qwen2_windows", "gemma3"])
def test_calls_with_another_cache_or_none_are_unchanged(family):
    model = make_model(family)
    ids, mask = ragged_prompt()

    def observe():
        with torch.no_grad():
            cache = DynamicCache(config=model.config)
            first = model(ids[:, :30], attention_mask=mask[:, :30], past_key_values=cache, use_cache=True).logits
            second = model(ids[:, 30:], attention_mask=mask, past_key_values=cache, use_cache=True).logits
            plain = model(ids, attention_mask=mask, use_cache=False).logits
            unmasked = model(ids, use_cache=False).logits
            packed = model(ids[:1], position_ids=torch.arange(40)[None] % 20, use_cache=False).logits
        return [first, second, plain, unmasked, packed, greedy(model, ids, 4, attention_mask=mask)]

    before = observe()
    compressed_cache(model)
    assert model.config._attn_implementation == "fastattn"
    for was, now in zip(before, observe(), strict=True):
        assert torch.equal(was, now)


def test_training_is_unchanged():
    model = make_model("llama", attention_dropout=0.1)
    ids, mask = ragged_prompt()

    def gradients():
        model.zero_grad()
        torch.manual_seed(3)
        model(ids, attention_mask=mask, labels=ids, use_cache=False).loss.backward()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    model.train()
    before = gradients()
    compressed_cache(model)
    assert model.training
    assert all(module.training for module in model.modules())
    for was, now in zip(before, gradients(), strict=True):
        assert torch.equal(was, now)


@pytest.mark.parametrize(
    ("family", "policy"), [("llama", "expected_attention"), ("llama", "streaming_llm"), ("gemma3", "key_diff")]
)
def test_with_eviction_a_padded_row_generates_what_it_generates_alone(family, policy):
    model = make_model(family)
    ids, mask = ragged_prompt()
    settings = {"policy": small(policy), "budget": 10, "interval": 3}
    cache = compressed_cache(model, batch_size=3, **settings)
    together = greedy(model, ids, attention_mask=mask, past_key_values=cache)
    for row in range(3):
        own = ids[row : row + 1, mask[row] == 1]
        alone = greedy(model, own, past_key_values=compressed_cache(model, **settings))
        assert torch.equal(alone[0, own.shape[1] :], together[row, ids.shape[1] :])
    assert int(cache.kv.lengths(0).max()) < 13
    assert cache.kv.lengths(0).shape == (3, 2)


@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-3), (torch.float64, 1e-11)])
@pytest.mark.parametrize("policy", POLICIES)
def test_with_eviction_a_padded_row_keeps_what_it_keeps_alone(policy, dtype, close):
    # Equal tokens have keys of equal norm in the first layer, and rounding would decide between them: none is repeated.
    model = make_model("llama").to(dtype)
    _, mask = ragged_prompt()
    ids = distinct_tokens(3, 50)
    settings = {"policy": small(policy), "budget": 10, "interval": 3}
    cache = compressed_cache(model, batch_size=3, **settings)
    logits = [prefill(model, ids[:, :40].masked_fill(mask == 0, 0), cache, attention_mask=mask)]
    logits += [prefill(model, ids[:, t : t + 1], cache) for t in range(40, 50)]
    for row in range(3):
        own = ids[row : row + 1, :40][:, mask[row] == 1]
        alone = compressed_cache(model, **settings)
        found = [prefill(model, own, alone)]
        found += [prefill(model, ids[row : row + 1, t : t + 1], alone) for t in range(40, 50)]
        torch.testing.assert_close(torch.cat(found), torch.stack(logits)[:, row], rtol=close, atol=close)
        for layer in range(2):
            assert torch.equal(alone.kv.positions(layer)[0], cache.kv.positions(layer)[row])


def test_right_padding_is_served_as_the_mask_says():
    model = make_model("llama")
    ids, mask = ragged_prompt(side="right")
    settings = {"policy": "key_diff", "budget": 16, "interval": 4}
    cache = compressed_cache(model, batch_size=3, **settings)
    prefill(model, ids, cache, attention_mask=mask)
    for row in range(3):
        own = ids[row : row + 1, mask[row] == 1]
        alone = compressed_cache(model, **settings)
        prefill(model, own, alone)
        kept = int(alone.kv.lengths(0)[0, 0])
        for layer in range(2):
            assert cache.kv.lengths(layer)[row].tolist() == alone.kv.lengths(layer)[0].tolist()
            assert torch.equal(cache.kv.positions(layer)[row, :, :kept], alone.kv.positions(layer)[0, :, :kept])


def test_beams_give_the_tokens_of_the_default_cache():
    model = make_model("llama")
    ids, mask = ragged_prompt()
    expected = greedy(model, ids, attention_mask=mask, num_beams=3, num_return_sequences=2)
    cache = compressed_cache(model, "key_diff", 128, batch_size=9)
    found = greedy(model, ids, attention_mask=mask, num_beams=3, num_return_sequences=2, past_key_values=cache)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("family", ["llama", "qwen2_windows"])
def test_beams_with_eviction_equal_each_row_alone(family):
    model = make_model(family)
    ids, mask = ragged_prompt()
    settings = {"policy": "expected_attention", "budget": 16, "interval": 4}
    together = greedy(
        model,
        ids,
        attention_mask=mask,
        num_beams=2,
        past_key_values=compressed_cache(model, batch_size=6, **settings),
    )
    for row in range(3):
        own = ids[row : row + 1, mask[row] == 1]
        cache = compressed_cache(model, batch_size=2, **settings)
        alone = greedy(model, own, num_beams=2, past_key_values=cache)
        assert torch.equal(alone[0, own.shape[1] :], together[row, ids.shape[1] :])


def test_sampling_several_sequences_gives_the_samples_of_the_default_cache():
    model = make_model("llama")
    ids, mask = ragged_prompt()
    options = {"do_sample": True, "num_return_sequences": 2, "max_new_tokens": 8, "attention_mask": mask}
    torch.manual_seed(5)
    expected = model.generate(ids, **options)
    torch.manual_seed(5)
    found = model.generate(ids, past_key_values=compressed_cache(model, "key_diff", 128, batch_size=6), **options)
    assert torch.equal(found, expected)


def test_prompt_lookup_decoding_crops_the_cache():
    model = make_model("llama")
    ids, _ = ragged_prompt()
    ids = ids[:1, :12].repeat(1, 4)
    options = {"eos_token_id": 1}  # transformers 5.2 cannot look up without one
    expected = greedy(model, ids, 24, **options)
    cache = compressed_cache(model, "key_diff", 128, max_step=8)
    assert torch.equal(greedy(model, ids, 24, past_key_values=cache, prompt_lookup_num_tokens=3, **options), expected)
    assert int(cache.kv.columns) <= expected.shape[1]


def test_assisted_decoding_with_a_draft_model():
    model, draft = make_model("llama"), make_model("llama", num_hidden_layers=1)
    ids, _ = ragged_prompt()
    expected = greedy(model, ids[:1])
    cache = compressed_cache(model, "key_diff", 128, max_step=32)
    assert torch.equal(greedy(model, ids[:1], past_key_values=cache, assistant_model=draft), expected)


def test_a_second_turn_feeds_only_what_is_new():
    model = make_model("llama")
    ids, mask = ragged_prompt()
    new, _ = ragged_prompt((6, 6, 6), 6)
    grown = torch.cat([greedy(model, ids, 8, attention_mask=mask), new], 1)
    longer = torch.cat([mask, torch.ones(3, 14, dtype=torch.long)], 1)
    expected = greedy(model, grown, 8, attention_mask=longer)
    cache = compressed_cache(model, "key_diff", 128, batch_size=3)
    greedy(model, ids, 8, attention_mask=mask, past_key_values=cache)
    assert torch.equal(greedy(model, grown, 8, attention_mask=longer, past_key_values=cache), expected)
    # Whole history again, but no token twice.
    assert cache.kv.tokens_seen.tolist() == [61, 48, 35]


def test_a_second_turn_may_be_given_alone():
    model = make_model("llama")
    ids, mask = ragged_prompt()
    new, _ = ragged_prompt((6, 6, 6), 6)

    def second_turn(cache):
        first = greedy(model, ids, 8, attention_mask=mask, past_key_values=cache)
        # The last token of a turn has not been fed: it opens the next.
        turn = torch.cat([first[:, -1:], new], 1)
        longer = torch.cat([mask, torch.ones(3, 14, dtype=torch.long)], 1)
        return greedy(model, turn, 8, attention_mask=longer, past_key_values=cache)[:, 7:]

    try:
        expected = second_turn(DynamicCache(config=model.config))
    except (IndexError, RuntimeError, ValueError) as error:
        pytest.skip(f"this transformers takes the whole history only, with its own caches too: {error}")
    cache = compressed_cache(model, "key_diff", 128, batch_size=3)
    assert torch.equal(second_turn(cache), expected)
    assert cache.kv.tokens_seen.tolist() == [61, 48, 35]


def test_a_second_prompt_on_a_reset_cache_starts_anew():
    model = make_model("qwen2_windows")
    ids, mask = ragged_prompt()
    other, other_mask = ragged_prompt((33, 12, 25), 33)
    settings = {"policy": "key_diff", "budget": 16, "interval": 4, "batch_size": 3}
    fresh = greedy(model, other, attention_mask=other_mask, past_key_values=compressed_cache(model, **settings))
    cache = compressed_cache(model, **settings)
    greedy(model, ids, attention_mask=mask, past_key_values=cache)
    cache.reset()
    assert torch.equal(greedy(model, other, attention_mask=other_mask, past_key_values=cache), fresh)


def test_models_that_share_a_configuration_are_each_served():
    first = make_model("llama")
    second, lone = type(first)(first.config).eval(), make_model("llama")
    lone.load_state_dict(second.state_dict())
    ids = ragged_prompt()[0][:1]
    for model, plain in ((first, make_model("llama")), (second, lone)):
        cache = compressed_cache(model, "key_diff", 128)
        assert torch.equal(greedy(model, ids, past_key_values=cache), greedy(plain, ids))
        assert cache.get_seq_length() == 51
        assert torch.equal(greedy(model, ids), greedy(plain, ids))


def test_the_default_device_is_not_taken_for_the_model_s():
    model = make_model("llama")
    with torch.device("meta"):
        cache = compressed_cache(model, "expected_attention", 16)
    ids = ragged_prompt()[0][:1]
    assert torch.equal(
        prefill(model, ids, cache), prefill(model, ids, compressed_cache(model, "expected_attention", 16))
    )


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("made_inside", [False, True])
def test_autocast_rounds_no_more_than_with_the_default_cache(dtype, made_inside):
    model, ids = make_model("llama"), ragged_prompt()[0][:1]

    def logits(model, cache):
        steps = [model(part, past_key_values=cache).logits for part in (ids[:, :32], *ids[:, 32:].split(1, dim=1))]
        return torch.cat(steps, dim=1)

    with torch.no_grad():
        exact = logits(make_model("llama").double(), DynamicCache())
        with torch.autocast("cpu", torch.bfloat16):
            plain = logits(model, DynamicCache())
        with torch.autocast("cpu", torch.bfloat16, enabled=made_inside):
            cache = compressed_cache(model, "key_diff", 64, dtype=dtype)
        with torch.autocast("cpu", torch.bfloat16):
            assert_within_budget(logits(model, cache), exact, plain, "logits")
    assert cache.kv.dtype == (dtype or torch.float32)


def test_two_caches_on_one_model_do_not_mix():
    model = make_model("llama")
    ids, _ = ragged_prompt()
    a, b = ids[:1], ids[1:2, 13:]
    settings = {"policy": "key_diff", "budget": 16, "interval": 4}
    steps = {}
    for name, prompt in (("a", a), ("b", b)):
        cache = compressed_cache(model, **settings)
        steps[name] = [prefill(model, prompt, cache)] + [prefill(model, prompt[:, t : t + 1], cache) for t in range(8)]
    first, second = compressed_cache(model, **settings), compressed_cache(model, **settings)
    assert torch.equal(prefill(model, a, first), steps["a"][0])
    assert torch.equal(prefill(model, b, second), steps["b"][0])
    for t in range(8):
        assert torch.equal(prefill(model, a[:, t : t + 1], first), steps["a"][t + 1])
        assert torch.equal(prefill(model, b[:, t : t + 1], second), steps["b"][t + 1])


@pytest.mark.parametrize("family", ["llama", "qwen2_windows"])
def test_prefill_in_chunks_within_the_budget_gives_the_logits_of_one_pass(family):
    model = make_model(family)
    ids, mask = ragged_prompt()
    with torch.no_grad():
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        expected = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits[:, -1]
    cache = compressed_cache(model, "key_diff", 64, batch_size=3)
    found = prefill(model, ids, cache, chunk_size=7, attention_mask=mask, progress=False)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert int(cache.get_seq_length()) == 40
    # The next turn's mask may cover everything or, where no window needs the rest, only what is new.
    more = prefill(model, ids, cache, attention_mask=torch.cat([mask, torch.ones_like(mask)], 1), progress=False)
    assert more.shape == (3, 100)


def test_a_long_prompt_in_chunks_keeps_memory_bounded():
    model = make_model("llama")
    ids, _ = ragged_prompt((200,), 200)
    cache = compressed_cache(model, "streaming_llm", 16, interval=4)
    size = cache.kv.nbytes
    prefill(model, ids, cache, chunk_size=32, progress=False)
    assert cache.kv.nbytes == size
    assert cache.kv.positions(0)[0, 0, :16].tolist() == [0, 1, 2, 3, *range(188, 200)]


def test_rows_can_be_selected_and_repeated():
    model = make_model("qwen2_windows")
    ids, mask = ragged_prompt()
    cache = compressed_cache(model, "key_diff", 64, batch_size=3)
    prefill(model, ids, cache, attention_mask=mask)
    expected = greedy(model, ids[2:], attention_mask=mask[2:])
    cache.batch_select_indices(torch.tensor([2]))
    assert (cache.batch_size, cache.max_batch_size) == (1, 1)
    cache.batch_repeat_interleave(2)
    step = expected[:, 40:41].expand(2, -1)
    longer = torch.cat([mask[2:], mask.new_ones(1, 1)], 1).expand(2, -1)
    following = prefill(model, step, cache, attention_mask=longer)
    assert following.argmax(-1).tolist() == [int(expected[0, 41])] * 2
