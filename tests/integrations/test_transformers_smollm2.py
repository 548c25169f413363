"""SmolLM2-135M-Instruct itself over compressed caches, in float32.

Two ways of computing the same logits round differently. A step where the reference's two best logits lie within 1e-4
may therefore choose the other token: it is printed, and the row is compared up to there.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from packaging.version import Version

from examples import smollm2
from fastattn.integrations.transformers import compressed_cache
from fastattn.modules import policy_names

pytestmark = [pytest.mark.transformers, pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")]

POLICIES = policy_names()
TOKENS = 200 if Version(transformers.__version__) >= Version("5.20") else 60  # the oldest release: the same, shorter
CLOSE = 1e-4
LENGTHS = (96, 61, 30)


@pytest.fixture(scope="module")
def model():
    model, _ = smollm2.load()
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture(scope="module")
def prompts():
    """Real text: ids and mask ``[3, 96]``, left-padded rows of different lengths from different places."""
    _, tokenizer = smollm2.load(torch.bfloat16)
    text = smollm2.long_text()
    ids = torch.full((3, max(LENGTHS)), tokenizer.pad_token_id)
    for row, length in enumerate(LENGTHS):
        start = 50_000 * (row + 1)
        ids[row, -length:] = torch.tensor(tokenizer(text[start : start + 8 * length])["input_ids"][:length])
    column = torch.arange(max(LENGTHS))
    return ids, (column >= max(LENGTHS) - torch.tensor(LENGTHS)[:, None]).long()


def generate(model, ids, mask, tokens, **kwargs):
    out = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=tokens,
        do_sample=False,
        return_dict_in_generate=True,
        **kwargs,
    )
    logits = torch.stack(out.logits, 1) if kwargs.get("output_logits") else None
    return out.sequences[:, ids.shape[1] :], logits


def assert_same_tokens(found, expected, logits, name):
    """Rows of ``found`` equal ``expected``, up to a step where the reference's ``logits`` hardly choose."""
    for row in range(found.shape[0]):
        different = (found[row] != expected[row]).nonzero()
        if not len(different):
            continue
        step = int(different[0])
        best, second = logits[row, step].topk(2).values.tolist()
        print(
            f"{name}, row {row}: step {step} chose {int(found[row, step])} for {int(expected[row, step])}, the two "
            f"best logits being {best:.6f} and {second:.6f}"
        )
        assert best - second <= CLOSE, f"{name}, row {row}: another token at step {step}"


class SideBySide:
    """Several caches that share the rows of a batch, in place of one: the weights are read once for all of them."""

    max_step = 1

    def __init__(self, caches):
        self.caches = caches
        self.rows = [cache.batch_size for cache in caches]
        self.batch_size = sum(self.rows)

    @property
    def columns(self):
        return self.caches[0].columns

    def positions(self, layer):
        return torch.cat([cache.positions(layer) for cache in self.caches])

    def attend(self, layer, *new, scale, **per_row):
        parts = [tensor.split(self.rows) for tensor in new]
        named = {name: tensor.split(self.rows) for name, tensor in per_row.items() if tensor is not None}
        outs = [
            cache.attend(layer, *(part[i] for part in parts), scale=scale, **{n: t[i] for n, t in named.items()})
            for i, cache in enumerate(self.caches)
        ]
        return torch.cat(outs)


def test_many_tokens_within_the_budget_equal_the_default_cache(model, prompts):
    ids, mask = prompts
    expected, logits = generate(model, ids, mask, TOKENS, output_logits=True)
    # Every policy over row 0 alone (it has no padding) and over the padded batch of three.
    caches = [compressed_cache(model, policy, 300, batch_size=rows).kv for policy in POLICIES for rows in (1, 3)]
    cache = compressed_cache(model, batch_size=4 * len(POLICIES))
    cache._replace(SideBySide(caches))
    rows = torch.tensor([0, 0, 1, 2] * len(POLICIES))
    found, _ = generate(model, ids[rows], mask[rows], TOKENS, past_key_values=cache)
    for policy, part in zip(POLICIES, found.split(4), strict=True):
        assert_same_tokens(part[:1], expected[:1], logits[:1], f"{policy}, batch 1")
        assert_same_tokens(part[1:], expected, logits, f"{policy}, batch 3")
    for kv in caches:
        filled = [length + TOKENS - 1 for length in LENGTHS]
        assert kv.lengths(0)[:, 0].tolist() == filled[: kv.batch_size]


# Not Knorm: in the first layer equal tokens have keys of equal norm up to rounding, which then decides between them,
# and products over three rows round differently from those over one, padded or not. A small model's padded rows are
# compared in float64, with distinct tokens (test_transformers_generate.py), and exact ties at the cache itself
# (modules/test_policies.py).
@pytest.mark.parametrize("policy", ["expected_attention", "key_diff", "streaming_llm"])
def test_with_eviction_a_padded_row_generates_what_it_generates_alone(model, prompts, policy):
    ids, mask = prompts
    settings = {"policy": policy, "budget": 40, "interval": 6}
    cache = compressed_cache(model, batch_size=3, **settings)
    together, _ = generate(model, ids, mask, 20, past_key_values=cache)
    assert int(cache.kv.lengths(0).max()) < 46
    for row in range(3):
        own = slice(ids.shape[1] - LENGTHS[row], None)
        alone, logits = generate(
            model,
            ids[row : row + 1, own],
            mask[row : row + 1, own],
            20,
            output_logits=True,
            past_key_values=compressed_cache(model, **settings),
        )
        assert_same_tokens(together[row : row + 1], alone, logits, f"{policy}, row {row} alone")
