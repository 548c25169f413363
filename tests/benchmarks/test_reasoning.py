"""The reasoning task: what is drawn is solved right, the verifier sees every error, what is interrupted resumes."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("matplotlib", reason="the studies plot with matplotlib")
pytest.importorskip("tqdm", reason="the studies show progress with tqdm")
from benchmarks.studies.reasoning import evaluate, problems, report
from benchmarks.studies.reasoning import train as training
from benchmarks.studies.reasoning.model import KINDS, Reasoner

drawn = st.builds(problems.draw, st.integers(0, 2**40), st.integers(2, 24), st.integers(0, 24))


def by_substitution(text: str) -> int:
    """The asked value, from the text alone: names are replaced by their expressions until none is left, then Python
    computes.
    """
    *assignments, question = [part.strip() for part in text.strip().rstrip(";").split(";")]
    expressions = dict(part.split(" = ") for part in assignments)
    cache: dict[str, int] = {}

    def value(word: str) -> int:
        if word.isdigit():
            return int(word)
        if word not in cache:
            names = re.sub(r"[a-z]+", lambda found: str(value(found[0])), expressions[word])
            cache[word] = eval(names, {"__builtins__": {}}) % 10
        return cache[word]

    return value(question.removeprefix("find "))


@given(drawn)
def test_the_solution_is_what_substitution_gives(one):
    assert problems.answer(one) == str(by_substitution(one.text()))
    written = problems.solution(one)
    assert written[-4:-1] == ["\\boxed{", problems.answer(one), "}"]
    verdict = problems.verify(one, written)
    assert verdict.correct
    assert verdict.right == verdict.total
    assert verdict.first_wrong is None


@given(drawn, st.data())
def test_one_wrong_word_is_one_wrong_step(one, data):
    written = problems.solution(one)
    at = data.draw(st.integers(0, len(written) - 2).filter(lambda index: written[index] not in (";", "end")))
    word = data.draw(st.sampled_from([w for w in problems.WORDS if w not in (written[at], ";", "end")]))
    broken = [*written[:at], word, *written[at + 1 :]]
    verdict = problems.verify(one, broken)
    assert verdict.right == verdict.total - 1
    assert verdict.first_wrong == sum(w == ";" for w in written[:at])
    assert verdict.correct == (at < len(written) - 4)


@given(drawn, st.integers(0, 400))
def test_a_solution_that_stops_early_is_scored_and_never_raises(one, count):
    written = problems.solution(one)[:count]
    verdict = problems.verify(one, written)
    assert verdict.correct == (count >= len(problems.solution(one)) - 1)
    assert 0 <= verdict.right <= verdict.total


@given(drawn)
def test_text_and_tokens_come_back(one):
    again = problems.parse(one.text())
    assert again.assignments == one.assignments
    assert problems.solution(again) == problems.solution(one)
    assert problems.decode(problems.encode(one.words())) == one.words()


@given(st.integers(0, 1000), st.integers(0, 1000), st.integers(2, 12), st.integers(0, 12))
def test_length_depends_on_the_difficulty_alone(first, second, chain, distractors):
    one, other = (problems.draw(seed, chain, distractors) for seed in (first, second))
    assert len(one.words()) == len(other.words())
    assert len(problems.solution(one)) == len(problems.solution(other))
    assert (one == other) == (first == second)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("ka = 7 ; ri = ka / 5 ; find ri ;", "assignments must read"),
        ("ka = 7 ; ri = ka + 5 ; give ri ;", "must end with 'find name ;'"),
        ("ka = ri + 1 ; ri = ka + 5 ; find ri ;", "chain of assignments to a number"),
        ("ka = 7 ; find ri ;", "chain of assignments to a number"),
    ],
)
def test_another_text_is_no_problem(text, says):
    with pytest.raises(ValueError, match=says):
        problems.parse(text)


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="chain must be at least 2 assignments, got 1"):
        problems.draw(0, 1, 4)
    with pytest.raises(ValueError, match="distractors must be from 0 to 45 beside a chain of 40, got 46"):
        problems.draw(0, 40, 46)
    with pytest.raises(ValueError, match="names without a value: ka"):
        problems.values(problems.Problem((problems.Assignment("ka", "ri", "+", "1"),), ("ka",)))
    with pytest.raises(ValueError, match=r"vocabulary of .* words, got 'seven'"):
        problems.encode(["seven"])
    with pytest.raises(ValueError, match="kind must be one of gqa, low_rank, low_rank_query, got 'mha'"):
        Reasoner("mha")


def test_targets_are_the_solution_and_nothing_else():
    setting = replace(training.QUICK, steps=10)
    ids, targets = training.draw_batch(setting, 9)
    for row, wanted in zip(ids.tolist(), targets.tolist(), strict=True):
        words, known = problems.decode(row), [index for index in wanted if index != -100]
        at = words.index("plan")
        one = problems.parse(" ".join(words[:at]))
        assert problems.decode(known) == problems.solution(one)
        assert wanted[at - 1] == problems.INDEX["plan"]
    again = training.draw_batch(setting, 9)
    assert torch.equal(ids, again[0])
    assert torch.equal(targets, again[1])


# compiling is not worth a compiler's seconds at this size; tests/compile holds the modules
SMALL = training.Setting(steps=6, chain=3, distractors=2, tokens_per_step=256, layers=1, compiled=False)


@pytest.mark.parametrize("kind", KINDS)
def test_resumed_training_equals_an_uninterrupted_run(tmp_path, monkeypatch, kind):
    whole = training.train(kind, SMALL, tmp_path / "whole", every=2)
    drawing = training.draw_batch

    def interrupted(setting, step):
        if step == 5:
            raise KeyboardInterrupt
        return drawing(setting, step)

    monkeypatch.setattr(training, "draw_batch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        training.train(kind, SMALL, tmp_path / "resumed", every=2)
    with pytest.raises(SystemExit, match="4 of 6 steps"):
        training.load(kind, tmp_path / "resumed")
    monkeypatch.setattr(training, "draw_batch", drawing)
    resumed = training.train(kind, SMALL, tmp_path / "resumed", every=2)
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name
    with pytest.raises(SystemExit, match="another setting"):
        training.train(kind, replace(SMALL, steps=7), tmp_path / "resumed")


@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_that_holds_all_writes_what_the_model_alone_would(kind):
    torch.manual_seed(0)
    model = Reasoner(kind, 2).eval()
    asked = [problems.draw(seed, 3, 2) for seed in range(3)]
    written = evaluate.solve(model, asked, "expected_attention", 200, 20)
    for one, words in zip(asked, written, strict=True):
        ids = problems.encode(one.words())
        for word in words:
            assert problems.INDEX[word] == int(model(torch.tensor([ids]))[0, -1].argmax())
            ids.append(problems.INDEX[word])


def test_evaluation_resumes_and_reports(tmp_path):
    training.train("gqa", SMALL, tmp_path, every=3)
    sweep = evaluate.Sweep(("gqa",), ("knorm", "random"), 5, 2, tmp_path)
    whole = (tmp_path / "reasoning.csv", evaluate.evaluate(sweep, tmp_path))[0].read_text()
    lines = whole.splitlines(keepends=True)
    assert len(lines) == 2 + 1 + 2 * len(evaluate.sizes(training.length(3, 2)))
    (tmp_path / "reasoning.csv").write_text("".join(lines[:6]))
    rows = evaluate.evaluate(sweep, tmp_path)
    assert (tmp_path / "reasoning.csv").read_text() == whole
    text = report.report(rows, tmp_path)
    assert "grouped-query attention" in text
    assert (tmp_path / "reasoning.png").exists()


def test_order_tells_apart_what_differs_on_the_same_problems():
    def row(bits):
        return {"solved": bits}

    found = {("a", 8): row("1" * 20), ("b", 8): row("1" * 10 + "0" * 10), ("c", 8): row("1" * 9 + "0" * 11)}
    assert report.order(found, 8) == "a > b ~ c"
    assert report.sign_test([1] * 5, [0] * 5) == pytest.approx(2 / 32)
    assert report.sign_test([1, 0], [1, 0]) == 1.0


def test_sizes_run_from_a_sixteenth_to_the_whole():
    found = evaluate.sizes(512)
    assert (found[0], found[-1], len(found)) == (32, 512, 9)
