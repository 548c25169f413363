"""lm_eval's model type ``fastattn`` on SmolLM2, with tasks from local files: nothing is downloaded.

Runs where lm_eval is installed (``make test-lm-eval`` sets that up): it brings some fifty packages.
"""

from __future__ import annotations

import json
import logging
import textwrap

import pytest
import torch

pytest.importorskip("lm_eval", reason="lm_eval is not installed: make test-lm-eval sets up an environment that has it")

from lm_eval import simple_evaluate
from lm_eval.api.registry import get_model
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from examples import smollm2
from fastattn.integrations.lm_eval import FastattnLM

pytestmark = [pytest.mark.transformers, pytest.mark.filterwarnings("ignore")]

TASKS = {
    "local_choice": """
        output_type: multiple_choice
        doc_to_text: "{{text}}"
        doc_to_choice: choices
        doc_to_target: answer
        metric_list: [{metric: acc}]
        """,
    "local_generation": """
        output_type: generate_until
        doc_to_text: "{{text}}"
        doc_to_target: ""
        generation_kwargs: {until: ["\\n\\n"], max_gen_toks: 12, do_sample: false}
        metric_list: [{metric: exact_match}]
        """,
    "local_rolling": """
        output_type: loglikelihood_rolling
        doc_to_text: ""
        doc_to_target: "{{text}}"
        metric_list: [{metric: word_perplexity}]
        """,
}
CHOICES = [" a list", " the value of a name", ".", " nothing at all, since it was never defined"]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """Three tasks over four texts of different lengths."""
    folder = tmp_path_factory.mktemp("tasks")
    text = smollm2.long_text()
    docs = [
        {"text": text[start : start + length].strip(), "choices": CHOICES, "answer": index}
        for index, (start, length) in enumerate([(0, 600), (5000, 250), (9000, 90), (14000, 420)])
    ]
    (folder / "docs.jsonl").write_text("\n".join(json.dumps(doc) for doc in docs))
    for name, task in TASKS.items():
        shared = f"task: {name}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {folder}/docs.jsonl}}}}\n"
        (folder / f"{name}.yaml").write_text(shared + "test_split: test\n" + textwrap.dedent(task))
    return TaskManager(include_path=str(folder), include_defaults=False)


@pytest.fixture(scope="module")
def model_and_tokenizer():
    return smollm2.load(torch.float32)


def evaluated(lm, tasks):
    """The raw answers of ``lm`` to every request, by task."""
    logging.disable(logging.WARNING)
    found = simple_evaluate(lm, tasks=list(TASKS), task_manager=tasks, bootstrap_iters=0, log_samples=True)
    logging.disable(logging.NOTSET)
    samples = found["samples"]
    return {name: [sample["resps"] for sample in sorted(samples[name], key=lambda s: s["doc_id"])] for name in TASKS}


def test_without_eviction_it_is_the_harness_own_model(model_and_tokenizer, tasks):
    model, tokenizer = model_and_tokenizer
    expected = evaluated(HFLM(model, tokenizer=tokenizer, batch_size=2), tasks)
    settings = {"budget": 400, "interval": 8, "chunk_size": 64, "batch_size": 3}
    lm = FastattnLM(model, tokenizer=tokenizer, policy="expected_attention", **settings)
    found = evaluated(lm, tasks)
    for ours, theirs in zip(found["local_choice"], expected["local_choice"], strict=True):
        for (ll, greedy), (their_ll, their_greedy) in zip(
            [choice[0] for choice in ours], [choice[0] for choice in theirs], strict=True
        ):
            assert float(ll) == pytest.approx(float(their_ll), abs=1e-3)  # float32, another order of sums
            assert greedy == their_greedy
    assert found["local_generation"] == expected["local_generation"]
    for ours, theirs in zip(found["local_rolling"], expected["local_rolling"], strict=True):
        assert float(ours[0][0]) == pytest.approx(float(theirs[0][0]), abs=1e-2)

    small = FastattnLM(model, tokenizer=tokenizer, policy="knorm", **settings | {"budget": 16})
    compressed = evaluated(small, tasks)
    for name in TASKS:
        assert compressed[name] != found[name]


def test_quantised_storage_and_beams(model_and_tokenizer, tasks):
    model, tokenizer = model_and_tokenizer
    lm = get_model("fastattn")(model, tokenizer=tokenizer, budget=64, storage="int8", chunk_size=16)
    assert isinstance(lm, FastattnLM)
    request = (("a", "b"), tokenizer("The value of a name in Python is").input_ids, tokenizer(" an object").input_ids)
    ((exact, _),) = HFLM(model, tokenizer=tokenizer)._loglikelihood_tokens([request], disable_tqdm=True)
    ((ll, greedy),) = lm._loglikelihood_tokens([request], disable_tqdm=True)
    assert exact != ll
    assert exact == pytest.approx(ll, abs=0.1)
    assert isinstance(greedy, bool)
    context = torch.tensor([request[1] * 4, request[1] * 4])
    mask = torch.ones_like(context)
    mask[1, :5] = 0
    plain = FastattnLM(model, tokenizer=tokenizer, budget=256, chunk_size=10)
    options = {"attention_mask": mask, "num_beams": 2}
    ours = plain._model_generate(context, context.shape[1] + 6, ["\n\n"], **options)
    theirs = HFLM(model, tokenizer=tokenizer)._model_generate(context, context.shape[1] + 6, ["\n\n"], **options)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"policy": "nothing"}, ValueError, "policy must be"),
        ({"budget": 0}, ValueError, "budget must be at least 1"),
        ({"storage": "int3"}, ValueError, "storage must be"),
        ({"chunk_size": 0}, ValueError, "chunk_size must be at least 1"),
        ({"chunk_size": "8"}, TypeError, "chunk_size must be an integer"),
        ({"batch_size": "auto"}, ValueError, "batch_size must be a number"),
    ],
)
def test_wrong_arguments(model_and_tokenizer, options, error, message):
    model, tokenizer = model_and_tokenizer
    with pytest.raises(error, match=message):
        FastattnLM(model, tokenizer=tokenizer, **options)
