"""A compiled transformers model over compressed caches: one graph for decoding, whatever the caches hold."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

import transformers

from fastattn.integrations.transformers import _versions, compressed_cache, prefill
from tests._helpers.compiling import counting, no_recompiles
from tests._helpers.hf_models import make_model, ragged_prompt

pytestmark = [
    pytest.mark.transformers,
    pytest.mark.compile,
    pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated"),
]

STEPS = 26  # at budget 12 and interval 4: six evictions after the prompt's


def decode(step, model, cache, ids, mask):
    """Greedy tokens ``[B, STEPS]`` by ``step``, after a prompt that is fed eagerly."""
    name, out = _versions.cache_argument(model), []
    with torch.no_grad():
        token = prefill(model, ids, cache, attention_mask=mask).argmax(-1, keepdim=True)
        for i in range(STEPS):
            logits = step(input_ids=token, position_ids=mask.sum(1, keepdim=True) + i, **{name: cache}).logits
            token = logits[:, -1].argmax(-1, keepdim=True)
            out.append(token)
    return torch.cat(out, 1)


@pytest.mark.parametrize(
    ("family", "policy", "backend"),
    [("llama", "key_diff", "inductor"), ("qwen3", "expected_attention", "aot_eager"), ("phi3", "knorm", "aot_eager")],
)
def test_decoding_is_one_graph(family, policy, backend):
    model = make_model(family)

    def new_cache():
        return compressed_cache(model, policy, 12, batch_size=3, interval=4)

    ids, mask = ragged_prompt()
    others, others_mask = ragged_prompt((31, 5, 29), 33)
    expected = decode(model, model, new_cache(), ids, mask)
    expected_others = decode(model, model, new_cache(), others, others_mask)
    with counting() as counts:
        compiled = torch.compile(model, fullgraph=True, backend=backend)
        assert torch.equal(decode(compiled, model, new_cache(), ids, mask), expected)
        assert (counts.read().graphs, counts.breaks) == (1, 0)
        with no_recompiles():  # another cache object, another prompt, other lengths
            cache = new_cache()
            assert torch.equal(decode(compiled, model, cache, others, others_mask), expected_others)
            cache.reset()
            assert torch.equal(decode(compiled, model, cache, ids, mask), expected)
    assert int(cache.kv.lengths(0).max()) < 16


def test_prefill_compiles_once_and_once_more_for_other_lengths():
    model = make_model("llama")
    name = _versions.cache_argument(model)
    with counting() as counts, torch.no_grad():
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        for columns in (40, 33, 29, 52):
            ids, mask = ragged_prompt((columns, columns - 9, 14), columns)
            positions = (mask.cumsum(1) - 1).clamp(min=0)
            caches = [compressed_cache(model, "key_diff", 12, batch_size=3, interval=4) for _ in range(2)]
            arguments = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
            expected = model(**arguments, **{name: caches[0]}).logits
            found = compiled(**arguments, **{name: caches[1]}).logits
            real = mask.bool()
            torch.testing.assert_close(found[real], expected[real], rtol=1e-4, atol=1e-4)
            assert torch.equal(caches[1].kv.positions(1), caches[0].kv.positions(1))
        assert (counts.read().graphs, counts.breaks) == (2, 0)


def test_generate_compiles_by_itself():
    model = make_model("llama")
    ids, mask = ragged_prompt()
    options = {"attention_mask": mask, "max_new_tokens": STEPS, "do_sample": False}

    def new_cache(**settings):
        return compressed_cache(model, "key_diff", 12, batch_size=3, interval=4, **settings)

    assert new_cache().is_compileable
    assert not new_cache(max_step=4).is_compileable
    expected = model.generate(ids, past_key_values=new_cache(), **options)
    config = transformers.CompileConfig(fullgraph=True, mode="default")
    config._compile_all_devices = True  # transformers compiles on accelerators only, unless told
    with counting() as counts:
        found = model.generate(ids, past_key_values=new_cache(), compile_config=config, **options)
        assert torch.equal(found, expected)
        assert (counts.read().graphs, counts.breaks) == (1, 0)
        with no_recompiles():
            found = model.generate(ids, past_key_values=new_cache(), compile_config=config, **options)
        assert torch.equal(found, expected)
    if hasattr(model, "_compiled_call"):
        del model._compiled_call


def test_a_switched_model_compiles_without_a_compressed_cache():
    model = make_model("llama")
    ids, mask = ragged_prompt()
    with torch.no_grad():
        expected = model(ids, attention_mask=mask, use_cache=False).logits
        compressed_cache(model)
        with counting() as counts:
            found = torch.compile(model, fullgraph=True, backend="eager")(ids, attention_mask=mask, use_cache=False)
            assert counts.read().breaks == 0
    torch.testing.assert_close(found.logits, expected)


def test_a_wrong_call_says_so_while_compiling():
    model = make_model("llama")
    ids, _ = ragged_prompt()
    cache = compressed_cache(model, batch_size=2)
    name = _versions.cache_argument(model)
    with counting(), torch.no_grad(), pytest.raises(Exception, match="this cache has 2, got a call of 3"):
        torch.compile(model, fullgraph=True, backend="aot_eager")(ids, **{name: cache})
    assert int(cache.kv.columns) == 0
