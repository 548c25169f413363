"""The policies that have a name, listed once: README's table, demo, studies, benchmarks and tests read it here."""

from __future__ import annotations

from dataclasses import dataclass

from fastattn.modules.policies.attended import H2O, TOVA, SnapKV
from fastattn.modules.policies.base import Policy
from fastattn.modules.policies.baselines import Random
from fastattn.modules.policies.expected_attention import ExpectedAttention
from fastattn.modules.policies.keys import KeyDiff, Knorm
from fastattn.modules.policies.streaming_llm import StreamingLLM


@dataclass(frozen=True)
class NamedPolicy:
    """A policy that can be asked for by name.

    Attributes:
        name: what users write.
        policy: its class; the name stands for an object with default arguments.
        keeps: which tokens it keeps, in one line.
        source: where it was published.
    """

    name: str
    policy: type[Policy]
    keeps: str
    source: str


NAMED_POLICIES: dict[str, NamedPolicy] = {
    named.name: named
    for named in (
        NamedPolicy(
            "expected_attention",
            ExpectedAttention,
            "tokens that coming queries are expected to attend to, weighted by the value's norm",
            "arXiv 2510.00636",
        ),
        NamedPolicy("knorm", Knorm, "tokens whose key has a small norm", "arXiv 2406.11430"),
        NamedPolicy("streaming_llm", StreamingLLM, "the first tokens and the newest", "arXiv 2309.17453"),
        NamedPolicy("key_diff", KeyDiff, "tokens whose key points away from the average key", "arXiv 2504.15364"),
        NamedPolicy("snap_kv", SnapKV, "what the newest queries attend to, and their own tokens", "arXiv 2404.14469"),
        NamedPolicy("tova", TOVA, "what the newest query attends to, the same for all heads", "arXiv 2401.06104"),
        NamedPolicy(
            "h2o",
            H2O,
            "what has been attended to most since it was cached, and the newest",
            "arXiv 2306.14048",
        ),
        NamedPolicy("random", Random, "tokens drawn at random", "baseline"),
    )
}


def policy_names() -> tuple[str, ...]:
    """All names, in the order of the table above."""
    return tuple(NAMED_POLICIES)


def resolve_policy(policy: Policy | str) -> Policy:
    """The policy itself, or a new one with default arguments for its name.

    Raises:
        TypeError, ValueError: neither a policy nor the name of one.
    """
    if isinstance(policy, Policy):
        return policy
    if not isinstance(policy, str):
        got = f"the class {policy.__name__}" if isinstance(policy, type) else type(policy).__name__
        raise TypeError(f"policy must be a Policy or one of {sorted(NAMED_POLICIES)}, got {got}")
    if policy not in NAMED_POLICIES:
        raise ValueError(f"policy must be a Policy or one of {sorted(NAMED_POLICIES)}, got {policy!r}")
    return NAMED_POLICIES[policy].policy()
