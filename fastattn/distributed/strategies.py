"""Sharding strategies: what fastattn's operators do with DTensors. Importing this module registers them.

Every operator works on a shard of the batch or of the heads as on the whole, and attention on a shard of the queries:
none of that costs a collective. What would have to be gathered first is refused, so that nobody pays for it unasked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
from torch.distributed.tensor.experimental import register_sharding

from fastattn import ops as _ops  # noqa: F401 - defines the operators

_SUM = -1  # of a result: every rank has a part of the sum


@dataclass(frozen=True)
class Rule:
    """One way to shard an operator over one dim of a mesh.

    Attributes:
        what: the dim, in words.
        inputs: argument -> the dim of it that is sharded; other tensors are whole.
        outputs: the dims of the results that are sharded.
        refuse: why not, given the arguments; None where it is right.
    """

    what: str
    inputs: dict[str, int]
    outputs: tuple[int, ...]
    refuse: Callable[[dict[str, Any]], str | None] = lambda arguments: None


def _groups_divide(arguments: dict[str, Any]) -> str | None:
    """Whole groups of heads on every rank."""
    for name in ("key", "key_cache", "query", "query_latent", "outs"):
        given = arguments.get(name)
        spec: Any = given[0] if isinstance(given, (list, tuple)) and given else given
        if spec is not None and any(spec.shape[1] % size for size in spec.mesh.shape if size > 1):
            if name == "key" and spec.shape[1] == 1:
                continue  # one key/value head for all query heads: every rank has it
            return f"the {spec.shape[1]} heads of {name} must divide among the ranks of mesh {tuple(spec.mesh.shape)}"
    return None


def _one_sequence(arguments: dict[str, Any]) -> str | None:
    if arguments.get("cu_seqlens_q") is not None:
        return "packed rows are one row of the batch"
    return None


def _queries_alone(arguments: dict[str, Any]) -> str | None:
    """A shard of the queries does not say where they stand among the keys."""
    for name, harmless in (("causal", False), ("window", 0), ("alibi_slopes", None), ("cu_seqlens_q", None)):
        value = arguments.get(name, harmless)
        if value is not harmless and value != harmless:
            return f"{name} depends on where a query stands, which a shard of the queries does not say: gather them"
    return None


def _batch(*names: str, outputs: tuple[int, ...]) -> Rule:
    return Rule("the batch (dim 0)", dict.fromkeys(names, 0), outputs, _one_sequence)


def _heads(*names: str, outputs: tuple[int, ...], per_head: tuple[str, ...] = ("sinks", "alibi_slopes")) -> Rule:
    return Rule("the heads", {**dict.fromkeys(names, 1), **dict.fromkeys(per_head, 0)}, outputs, _groups_divide)


def _queries(*names: str, outputs: tuple[int, ...]) -> Rule:
    return Rule("the queries (dim 2)", dict.fromkeys(names, 2), outputs, _queries_alone)


_SLOTS = ("key", "value", "lengths", "positions")
_CACHE = ("key_cache", "value_cache", "positions", "lengths")
_WRITTEN = (*_CACHE, "key_scale", "value_scale")  # by operators that write
_STATISTICS = ("query_mean", "query_cov", "query_samples")
_BACKWARD = ("grad_out", "query", "key", "value", "out", "lse")
_CODES = (*_SLOTS, "key_scale", "value_scale")

RULES: dict[str, tuple[Rule, ...]] = {
    "attention": (
        _batch("query", "key", "value", "key_start", "lengths", outputs=(0, 0)),
        _heads("query", "key", "value", outputs=(1, 1)),
        _queries("query", outputs=(2, 2)),
    ),
    "attention_backward": (
        _batch(*_BACKWARD, "key_start", "lengths", outputs=(0, 0, 0)),
        _heads(*_BACKWARD, outputs=(1, 1, 1)),
        _queries("grad_out", "query", "out", "lse", outputs=(2, _SUM, _SUM)),
    ),
    "attention_sink_backward": (
        _batch("grad_out", "out", "lse", outputs=(_SUM,)),
        _heads("grad_out", "out", "lse", outputs=(0,)),
        _queries("grad_out", "out", "lse", outputs=(_SUM,)),
    ),
    "decode_attention": (
        _batch("query", *_SLOTS, outputs=(0, 0)),
        _heads("query", *_SLOTS, outputs=(1, 1)),
        _queries("query", outputs=(2, 2)),
    ),
    "latent_decode": (
        _batch("query_latent", "query_rope", "cache", "lengths", outputs=(0, 0)),
        _heads("query_latent", "query_rope", outputs=(1, 1)),
        _queries("query_latent", "query_rope", outputs=(2, 2)),
    ),
    "decode_codes": (
        _batch("query", *_CODES, outputs=(0, 0)),
        _heads("query", *_CODES, outputs=(1, 1)),
        _queries("query", outputs=(2, 2)),
    ),
    "merge_attention": (
        _batch("outs", "lses", outputs=(0, 0)),
        _heads("outs", "lses", outputs=(1, 1)),
        Rule("the queries (dim 2)", {"outs": 2, "lses": 2}, (2, 2)),
    ),
    "qk_scores": (
        _batch("query", "key", outputs=(0,)),
        _heads("query", "key", outputs=(1,)),
        _queries("query", outputs=(2,)),
        Rule("the keys (dim 2 of key)", {"key": 2}, (3,)),
    ),
    "score_knorm": (_batch("key", "lengths", outputs=(0,)), _heads("key", "lengths", outputs=(1,))),
    "score_key_diff": (_batch("key", "lengths", outputs=(0,)), _heads("key", "lengths", outputs=(1,))),
    "score_expected_attention": (
        _batch(*_SLOTS, *_STATISTICS, outputs=(0,)),
        _heads(*_SLOTS, *_STATISTICS, outputs=(1,)),
    ),
    "query_moments": (_batch("query", "valid", outputs=(0, 0)), _heads("query", outputs=(1, 1))),
    "attention_mass": (
        _batch("key", "lengths", "positions", "query", "query_positions", outputs=(0,)),
        _heads("key", "lengths", "positions", "query", outputs=(1,)),
    ),
    "cache_append_": (
        _batch(*_CACHE, "key", "value", "position", outputs=()),
        _heads(*_CACHE, "key", "value", outputs=()),
    ),
    "cache_compact_": (_batch(*_CACHE, "scores", outputs=()), _heads(*_CACHE, "scores", outputs=())),
    "cache_append_codes_": (
        _batch(*_CACHE, "key_scale", "value_scale", "key", "value", "position", outputs=()),
        _heads(*_CACHE, "key_scale", "value_scale", "key", "value", outputs=()),
    ),
    "cache_compact_codes_": (
        _batch(*_CACHE, "key_scale", "value_scale", "scores", outputs=()),
        _heads(*_CACHE, "key_scale", "value_scale", "scores", outputs=()),
    ),
}
# Whose layout may be anything: PyTorch brings it into that of the others, at the price of a collective.
_FREE = frozenset({"grad_out", "out", "lse", "scores", "lengths", "positions", "position", "query_positions", "valid"})


def _tensors(arguments: dict[str, Any]) -> list[tuple[str, Any]]:
    """Name and spec of every tensor, those of lists one by one."""
    found = []
    for name, value in arguments.items():
        many: Any = value if isinstance(value, (list, tuple)) else [value]
        found += [(name, spec) for spec in many if hasattr(spec, "placements")]
    return found


def _chosen(operator: str, arguments: dict[str, Any], dim: int) -> Rule | None:
    """The one rule that fits how the arguments lie along ``dim`` of the mesh; None where all are whole.

    Raises:
        ValueError: none does, or it would be wrong.
    """
    written = operator.endswith("_")
    rules = RULES[operator]
    bound = [(n, s) for n, s in _tensors(arguments) if n not in _FREE or (written and n in _WRITTEN)]
    if operator == "attention_sink_backward":
        bound = [(name, spec) for name, spec in _tensors(arguments) if name in ("out", "lse")]
    placed = {name: spec.placements[dim] for name, spec in bound}
    if all(isinstance(placement, Replicate) for placement in placed.values()):
        return None
    for rule in rules:
        expected = {n: Shard(rule.inputs[n]) if n in rule.inputs else Replicate() for n in placed}
        if "key" in placed and "query" in placed and _shares_one_head(arguments, rule):
            expected |= {n: Replicate() for n in placed if n in _CODES}
        exact = written and any(placed[n] != expected[n] for n in placed if n in _WRITTEN)
        if exact or any(p not in (expected[n], Replicate()) for n, p in placed.items()):
            continue
        reason = rule.refuse(arguments)
        if reason is not None:
            raise ValueError(f"fastattn.ops.{operator} cannot be sharded over {rule.what}: {reason}")
        return rule
    ways = ", ".join(rule.what for rule in rules)
    got = ", ".join(f"{name} {placement}" for name, placement in placed.items())
    raise ValueError(
        f"fastattn.ops.{operator} takes DTensors that are whole or sharded over {ways}"
        f"{', the cache and all its parts alike' if written else ''}; got {got}: redistribute them first"
    )


def _shares_one_head(arguments: dict[str, Any], rule: Rule) -> bool:
    return rule.what == "the heads" and arguments["key"].shape[1] == 1 and arguments["query"].shape[1] > 1


def _strategy(operator: str, names: list[str]) -> Callable[..., Any]:
    def strategy(*given: Any) -> list[tuple[list[Placement | None], list[Placement | None]]]:
        arguments = dict(zip(names, given, strict=False))
        mesh = next(spec.mesh for _, spec in _tensors(arguments))
        chosen = [_chosen(operator, arguments, dim) for dim in range(mesh.ndim)]
        ways = []
        for rule in dict.fromkeys([rule.what if rule else "" for rule in chosen]):
            found = next((one for one in RULES[operator] if one.what == rule), None)
            ways.append(_placements(operator, found, arguments))
        return ways

    return strategy


def _placements(
    operator: str, rule: Rule | None, arguments: dict[str, Any]
) -> tuple[list[Placement | None], list[Placement | None]]:
    """Results and arguments as ``register_sharding`` wants them."""
    count = len(getattr(torch.ops.fastattn, operator).default._schema.returns)
    outputs: list[Placement | None] = [Replicate() for _ in range(count)]
    if rule is not None:
        outputs = [Partial() if dim == _SUM else Shard(dim) for dim in rule.outputs]
    inputs: list[Placement | None] = []
    shared = rule is not None and "key" in arguments and "query" in arguments and _shares_one_head(arguments, rule)
    for name, value in arguments.items():
        for one in value if isinstance(value, (list, tuple)) else [value]:
            if not hasattr(one, "placements"):
                inputs.append(None)
            elif rule is None or name not in rule.inputs or (shared and name in _CODES):
                inputs.append(Replicate())
            else:
                inputs.append(Shard(rule.inputs[name]))
    return outputs, inputs


def register_strategies() -> None:
    """Register a strategy for every operator, for calls with DTensors (done when this module is imported).

    What no rule fits raises: DTensor wraps the ValueError, which names operator and layout, in a RuntimeError.
    """
    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    for operator in RULES:
        overload = getattr(torch.ops.fastattn, operator).default
        names = [argument.name for argument in overload._schema.arguments]
        register_sharding(overload)(_strategy(operator, names))
        # What follows the tensors decides as well (causal, window): it belongs to the key of DTensor's table of
        # choices made before, which by default has numbers only.
        plain = [i for i, argument in enumerate(overload._schema.arguments) if "Tensor" not in str(argument.type)]
        propagator.op_to_schema_info[overload] = RuntimeSchemaInfo(plain[0] if plain else 100, needs_pytree=True)


register_strategies()
