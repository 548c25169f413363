"""The study on problems: what is wrong is said before hours are spent; batches and resumed runs change nothing."""

from __future__ import annotations

import json

import pytest
import torch

pytest.importorskip("matplotlib", reason="the studies plot with matplotlib")
pytest.importorskip("transformers", reason="the study runs transformers' models")
from benchmarks.studies import problem_sets
from benchmarks.studies import score_vs_cache_size as study
from benchmarks.studies.reasoning import problems
from benchmarks.studies.reasoning.model import Reasoner, export


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "line 2: must be a JSON object"),
        ("[1, 2]", "line 2: must be a JSON object"),
        ('{"answer": "4"}', "line 2: 'problem' must be text, got None"),
        ('{"problem": "a"}', "line 2: 'answer' must be text or a number, got None"),
        ('{"problem": "a", "answer": ["4"]}', "line 2: 'answer' must be text or a number"),
        ('{"problem": "a", "answer": true}', "line 2: 'answer' must be text or a number"),
        ('{"problem": 3, "answer": "4"}', "line 2: 'problem' must be text, got 3"),
        ('{"problem": " ", "answer": "4"}', "line 2: 'problem' must be text"),
    ],
)
def test_a_line_that_is_no_problem_is_named(tmp_path, line, says):
    path = tmp_path / "problems.jsonl"
    path.write_text(f'{{"problem": "1 + 1", "answer": 2}}\n{line}\n')
    with pytest.raises(SystemExit, match=says):
        problem_sets.read_problems(path)


def test_answers_may_be_numbers_and_an_empty_file_is_refused(tmp_path):
    path = tmp_path / "problems.jsonl"
    path.write_text('{"problem": "1 + 1", "answer": 2}\n\n{"problem": "half", "answer": "1/2"}\n')
    assert [one["answer"] for one in problem_sets.read_problems(path)] == ["2", "1/2"]
    path.write_text("\n")
    with pytest.raises(SystemExit, match="holds no problem"):
        problem_sets.read_problems(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model that writes words at random, and five problems of three lengths."""
    folder = tmp_path_factory.mktemp("reasoner")
    torch.manual_seed(0)
    export(Reasoner("gqa", 2), folder)
    drawn = [problems.draw(seed, 3, 2 + seed % 3) for seed in range(5)]
    lines = [json.dumps({"problem": one.text(), "answer": problems.answer(one)}) for one in drawn]
    (folder / "problems.jsonl").write_text("\n".join(lines))
    return folder


def run(folder, out, *more):
    study.main(
        [
            *("--model", str(folder), "--problems", str(folder / "problems.jsonl"), "--template", "{problem}"),
            *("--out", str(out), "--device", "cpu", "--interval", "8", "--query-window", "8", "--future", "8"),
            *("--max-new-tokens", "24", "--sizes", "24", "--policies", "expected_attention", "key_diff", *more),
        ]
    )
    return (out / "score_on_problems.csv").read_text()


def test_batches_and_resumed_runs_give_what_single_problems_give(folder, tmp_path, capsys):
    one_by_one = run(folder, tmp_path / "single")
    assert one_by_one.count("\n") == 2 + 2 * 5  # problems that are never answered are scored, not an error
    assert run(folder, tmp_path / "batch", "--batch", "3") == one_by_one
    cut = tmp_path / "resumed"
    cut.mkdir()
    (cut / "score_on_problems.csv").write_text("\n".join(one_by_one.splitlines()[:6]) + "\n")
    assert run(folder, cut, "--batch", "2") == one_by_one
    assert (cut / "score_on_problems.png").exists()
    assert "key_diff" in capsys.readouterr().out


def test_the_exported_model_is_the_trained_one(folder):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    model = Reasoner("gqa", 2).eval()
    one = problems.draw(7, 3, 2)
    ids = AutoTokenizer.from_pretrained(folder)(one.text(), return_tensors="pt").input_ids
    assert ids[0].tolist() == problems.encode(one.words())
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(folder).eval()(ids).logits
        torch.testing.assert_close(theirs, model(ids), rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="kind 'gqa' to be exported as a Llama, got 'low_rank'"):
        export(Reasoner("low_rank", 1), folder)


def test_what_cannot_run_is_said_before_anything_runs(folder, tmp_path):
    with pytest.raises(SystemExit, match=r"expected_attention at 2 tokens: .*budget"):
        run(folder, tmp_path, "--sizes", "2")
    with pytest.raises(SystemExit, match=r"--template must have \{problem\}"):
        run(folder, tmp_path, "--template", "solve")
