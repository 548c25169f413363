"""``python -m benchmarks.studies.reasoning --train`` then ``--evaluate``: a reasoning task's score against cache size.

``--train`` trains the three models (grouped-query attention, low-rank attention with full-rank and low-rank queries)
and goes on where it was interrupted; ``--evaluate`` has each solve held-out problems with every policy at nine cache
sizes. With ``--quick`` the model is smaller and the problems are easier: to see that it runs, not to conclude from.
``--export FOLDER`` saves the grouped-query model as a transformers Llama and its problems as JSONL, for
``python -m benchmarks.studies.score_vs_cache_size --model FOLDER --problems FOLDER/problems.jsonl``.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from benchmarks.studies.reasoning import evaluate, problems
from benchmarks.studies.reasoning.model import KINDS, export
from benchmarks.studies.reasoning.report import report
from benchmarks.studies.reasoning.train import QUICK, Setting, load, train

QUICK_POLICIES = ("expected_attention", "knorm", "streaming_llm", "key_diff")


def export_for_harness(folder: Path, trained: Path, count: int) -> None:
    """The grouped-query model and ``count`` held-out problems with their answers."""
    model, setting = load("gqa", trained)
    export(model, folder)
    drawn = [problems.draw(evaluate.FIRST_EVALUATED + i, setting.chain, setting.distractors) for i in range(count)]
    lines = [json.dumps({"problem": one.text(), "answer": problems.answer(one)}) for one in drawn]
    (folder / "problems.jsonl").write_text("\n".join(lines) + "\n")


def main(arguments: list[str] | None = None) -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    options.add_argument("--train", action="store_true", help="train the models, or go on")
    options.add_argument("--evaluate", action="store_true", help="solve problems at every size, or go on")
    options.add_argument("--export", type=Path, help="save the grouped-query model as a transformers folder")
    options.add_argument("--quick", action="store_true", help="a small setting that takes minutes")
    options.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    options.add_argument("--policies", nargs="+", choices=evaluate.all_policies(), help="default: all that have a name")
    options.add_argument("--problems", type=int, help="problems per point: 200, or 40 with --quick")
    options.add_argument("--steps", type=int, help="training steps, in place of the setting's")
    options.add_argument(
        "--out", type=Path, default=Path("out/reasoning"), help="folder of models, CSV, table and figure"
    )
    given = options.parse_args(arguments)
    if not (given.train or given.evaluate or given.export):
        options.error("give --train, --evaluate or --export FOLDER")
    setting = QUICK if given.quick else Setting()
    if given.steps:
        setting = Setting(**{**setting.__dict__, "steps": given.steps})
    if given.train:
        for kind in given.kinds:
            train(kind, setting, given.out)
    count = given.problems or (40 if given.quick else 200)
    if given.evaluate:
        policies = tuple(given.policies or (QUICK_POLICIES if given.quick else evaluate.all_policies()))
        sweep = evaluate.Sweep(tuple(given.kinds), policies, count, min(count, 100), given.out)
        report(evaluate.evaluate(sweep, given.out), given.out)
    if given.export:
        export_for_harness(given.export, given.out, count)
        print(f"written: {given.export}")


if __name__ == "__main__":
    main()
