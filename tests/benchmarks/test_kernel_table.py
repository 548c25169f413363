"""The committed table of compiled kernels: up to date, within the limits, and what the compiler gives again."""

from __future__ import annotations

import dataclasses

import pytest
import triton

from benchmarks import kernel_table
from benchmarks.lib import offline

pytestmark = pytest.mark.skipif(
    not triton.__version__.startswith(kernel_table.PINNED),
    reason=f"the table belongs to triton {kernel_table.PINNED}x, this is {triton.__version__}",
)
SAMPLE = 24
UPDATE = "python -m benchmarks.kernel_table --changed --write"


@pytest.fixture(scope="module")
def jobs():
    return {offline.source_of(job): job for job in kernel_table.unique_jobs()}


def test_every_kernel_of_every_target_is_in_the_committed_table(jobs):
    committed = kernel_table.committed()
    missing = [f"{job.case} {job.kernel} {job.family}" for source, job in jobs.items() if source not in committed]
    assert not missing, f"new or changed, run {UPDATE}: {missing}"
    assert not set(committed) - set(jobs), f"rows of kernels that are no more: run {UPDATE}"


def test_the_committed_table_keeps_the_limits(jobs):
    for source, row in kernel_table.committed().items():
        if source in jobs:
            assert not list(kernel_table.breaches(jobs[source], kernel_table.resources_of(row))), row


def test_compiling_again_gives_the_committed_numbers(jobs):
    committed = kernel_table.committed()
    sample = [jobs[source] for source in sorted(jobs)[:SAMPLE]]  # sources are fingerprints: any kernel, any target
    for job, row in zip(sample, kernel_table.compile_rows(sample, 2), strict=True):
        assert row.values == committed[offline.source_of(job)]
        assert not row.breaches


def _job(jobs, kernel, family, case=""):
    return next(j for j in jobs.values() if j.kernel == kernel and j.family == family and case in j.case)


def test_breaches_are_noticed(jobs):
    job = _job(jobs, "attention_kernel", "sm_90", "128/128")
    good = offline.Resources(registers=200, shared=1000, matrix={"HGMMA": 3}, wide_loads=4, dots=True, occupancy=1)

    def broken(**changes):
        return " ".join(kernel_table.breaches(job, dataclasses.replace(good, **changes)))

    assert broken() == ""
    assert "spills 8 bytes" in broken(spills=8)
    assert "2 local accesses" in broken(local=2)
    assert "shared memory" in broken(shared=300_000)
    assert "without HGMMA" in broken(matrix={"HMMA": 9})
    assert "16-byte load" in broken(wide_loads=0)
    assert "does not fit" in broken(occupancy=0)
    assert "does not compile" in broken(error="OutOfResources")


@pytest.mark.parametrize("pinned", [True, False])
def test_a_breach_is_gated_under_the_pinned_triton_and_reported_under_another(jobs, monkeypatch, capsys, pinned):
    row = kernel_table.Row(next(iter(kernel_table.committed().values())), ("spills 8 bytes",))
    monkeypatch.setattr(kernel_table, "unique_jobs", lambda only, target: [next(iter(jobs.values()))])
    monkeypatch.setattr(kernel_table, "compile_rows", lambda jobs, processes: [row] * len(jobs))
    monkeypatch.setattr(kernel_table, "write", lambda rows: pytest.fail("wrote another triton's numbers"))
    if not pinned:
        monkeypatch.setattr(kernel_table, "PINNED", "0.0.")
    assert kernel_table.main([] if pinned else ["--write"]) == int(pinned)
    printed = capsys.readouterr().out
    assert printed.startswith(f"triton {triton.__version__}, 1 kernels")
    assert "BREACH" in printed
    assert ("Not gated" in printed) == (not pinned)


def test_a_source_follows_code_and_config_but_not_comments(jobs):
    job = _job(jobs, "merge_kernel", "sm_90")
    same = dataclasses.replace(job, case="another name")
    assert offline.source_of(same) == offline.source_of(job)
    assert offline.source_of(dataclasses.replace(job, options=(("num_warps", 8),))) != offline.source_of(job)
