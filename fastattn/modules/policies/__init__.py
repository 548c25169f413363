"""Policies: which tokens a compressed cache keeps.

A policy gives every cached token of every row and key/value head a score; the ``budget`` highest survive, in time
order. :mod:`~fastattn.modules.policies.registry` lists those that have a name.
"""

from fastattn.modules.policies.attended import H2O, TOVA, SnapKV
from fastattn.modules.policies.base import CacheState, CodedState, Policy, QueryWindow, Stored
from fastattn.modules.policies.baselines import Random
from fastattn.modules.policies.composition import Protect
from fastattn.modules.policies.expected_attention import ExpectedAttention
from fastattn.modules.policies.keys import KeyDiff, Knorm
from fastattn.modules.policies.registry import NAMED_POLICIES, NamedPolicy, policy_names, resolve_policy
from fastattn.modules.policies.streaming_llm import StreamingLLM

__all__ = [
    "H2O",
    "NAMED_POLICIES",
    "TOVA",
    "CacheState",
    "CodedState",
    "ExpectedAttention",
    "KeyDiff",
    "Knorm",
    "NamedPolicy",
    "Policy",
    "Protect",
    "QueryWindow",
    "Random",
    "SnapKV",
    "Stored",
    "StreamingLLM",
    "policy_names",
    "resolve_policy",
]
