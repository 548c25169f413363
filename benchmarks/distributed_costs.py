"""What a decode step costs on several GPUs, from bytes, collectives and rates: ``-m benchmarks.distributed_costs``.

Nothing is timed here. The counts of collectives and their bytes are those of the code, which tests compare with what
2 and 4 processes send; rates and latencies are assumptions, of data sheets unless given.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields, replace


@dataclass(frozen=True)
class Shape:
    """A model, what is decoded with it, and how much of the text its cache keeps.

    Attributes:
        layers, hidden, heads, kv_heads, head_dim, intermediate, vocab: of a Llama-like model.
        bytes_per_number: of weights, keys, values and hidden states.
        context: tokens of text per row.
        kept: tokens that the cache keeps of them per row and head (the context: all).
        interval: steps between two compressions.
        batch: rows.
        policy: ``"none"`` where nothing is compressed; policies differ in what a compression sends.
    """

    layers: int = 80
    hidden: int = 8192
    heads: int = 64
    kv_heads: int = 8
    head_dim: int = 128
    intermediate: int = 28672
    vocab: int = 128256
    bytes_per_number: int = 2
    context: int = 2**20
    kept: int = 2**20
    interval: int = 128
    batch: int = 1
    policy: str = "key_diff"

    @property
    def weights(self) -> int:
        """Numbers in the weights."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate) + 2 * self.vocab * self.hidden


@dataclass(frozen=True)
class Machine:
    """Rates per GPU, bytes per second, and the time that a collective takes however small, seconds."""

    memory: float = 3.35e12
    near_link: float = 450e9
    far_link: float = 50e9
    near_latency: float = 10e-6
    far_latency: float = 25e-6
    gpus_per_node: int = 8


@dataclass(frozen=True)
class Collective:
    """One collective of a layer: ``size`` bytes that each of ``ranks`` brings; ``often`` times per step."""

    kind: str
    ranks: int
    size: int
    often: float = 1.0

    @property
    def traffic(self) -> float:
        """Bytes that a rank sends, with rings."""
        if self.ranks == 1:
            return 0.0
        return self.size * (2 * (self.ranks - 1) / self.ranks if self.kind == "all_reduce" else self.ranks - 1)

    def seconds(self, machine: Machine, far: bool) -> float:
        if self.ranks == 1:
            return 0.0
        rate, latency = (machine.far_link, machine.far_latency) if far else (machine.near_link, machine.near_latency)
        return self.often * (latency + self.traffic / rate)


def slots_per_rank(shape: Shape, ranks: int) -> int:
    """Slots of a row and head on one of ``ranks`` that share the tokens, as ContextParallelCache allocates them."""
    share = -(-shape.kept // ranks)
    return max(share + share // 4, -(-(shape.kept + shape.interval) // ranks))


def tensor_collectives(shape: Shape, ranks: int, tokens: int = 1) -> list[Collective]:
    """Of one layer and step, heads spread over ``ranks``: after attention and after the MLP."""
    size = shape.batch * tokens * shape.hidden * shape.bytes_per_number
    return [Collective("all_reduce", ranks, size), Collective("all_reduce", ranks, size)]


def output_collective(shape: Shape, ranks: int) -> Collective:
    """Of one step: every rank's part of the logits."""
    return Collective("all_gather", ranks, shape.batch * shape.vocab * shape.bytes_per_number // ranks)


def context_collectives(shape: Shape, ranks: int, tensor_ranks: int = 1) -> list[Collective]:
    """Of one layer and step, tokens spread over ``ranks``: of the merge, and of a compression."""
    heads, kv_heads = shape.heads // tensor_ranks, max(1, shape.kv_heads // tensor_ranks)
    merge = Collective("all_gather", ranks, shape.batch * heads * (shape.head_dim + 2) * 4)
    if shape.policy == "none":
        return [merge]
    often, slots = 1 / shape.interval, slots_per_rank(shape, ranks)
    of_policy = {
        "key_diff": shape.batch * kv_heads * shape.head_dim * 4,
        "expected_attention": shape.batch * heads * 4,
    }.get(shape.policy, 0)
    found = [merge, Collective("all_gather", ranks, 2 * shape.batch * kv_heads * slots * 4, often)]
    return [*found, Collective("all_gather", ranks, of_policy, often)] if of_policy else found


@dataclass(frozen=True)
class Cost:
    """Per GPU: bytes held, seconds of a step by what they go to, and bytes sent."""

    weights: float
    cache: float
    reading: float
    tensor: float
    context: float
    sent: float

    @property
    def step(self) -> float:
        return self.reading + self.tensor + self.context


def cost(shape: Shape, machine: Machine, tensor_ranks: int, context_ranks: int) -> Cost:
    """Of one decode step: ``tensor_ranks`` neighbors share heads and MLP, ``context_ranks`` such groups the tokens."""
    kv_heads = max(1, shape.kv_heads // tensor_ranks)
    per_token = 2 * kv_heads * shape.head_dim * shape.bytes_per_number * shape.layers * shape.batch
    held = slots_per_rank(shape, context_ranks) if context_ranks > 1 else shape.kept + shape.interval
    weights = shape.weights * shape.bytes_per_number / tensor_ranks
    read = weights + per_token * (shape.kept + shape.interval / 2) / context_ranks
    far = tensor_ranks * context_ranks > machine.gpus_per_node
    near = tensor_ranks <= machine.gpus_per_node
    tensor, output = tensor_collectives(shape, tensor_ranks), output_collective(shape, tensor_ranks)
    context = context_collectives(shape, context_ranks, tensor_ranks)
    return Cost(
        weights=weights,
        cache=per_token * held,
        reading=read / machine.memory,
        tensor=shape.layers * sum(one.seconds(machine, not near) for one in tensor) + output.seconds(machine, not near),
        context=shape.layers * sum(one.seconds(machine, far) for one in context),
        sent=shape.layers * sum(one.often * one.traffic for one in [*tensor, *context]) + output.traffic,
    )


def table(shape: Shape, machine: Machine, gpus: list[int]) -> str:
    """A row for every way to lay out each number of GPUs as tensor x context."""
    lines = [
        "| GPUs | tensor x context | weights, GB | cache, GB | reading, ms | tensor, ms | context, ms | step, ms |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for count in gpus:
        for tensor_ranks in (t for t in (1, 2, 4, 8, 16, 32, 64) if count % t == 0 and shape.heads % t == 0):
            if tensor_ranks > machine.gpus_per_node:
                continue
            one = cost(shape, machine, tensor_ranks, count // tensor_ranks)
            numbers = [one.weights / 1e9, one.cache / 1e9]
            numbers += [1e3 * seconds for seconds in (one.reading, one.tensor, one.context, one.step)]
            cells = " | ".join(f"{number:.1f}" for number in numbers)
            lines.append(f"| {count} | {tensor_ranks} x {count // tensor_ranks} | {cells} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, nargs="+", default=[8, 64])
    for group in (Shape(), Machine()):
        for one in fields(group):
            default = getattr(group, one.name)
            parser.add_argument(f"--{one.name.replace('_', '-')}", type=type(default), default=default)
    given = vars(parser.parse_args())
    shape = replace(Shape(), **{one.name: given[one.name] for one in fields(Shape)})
    machine = replace(Machine(), **{one.name: given[one.name] for one in fields(Machine)})
    per_layer = 2 * shape.kv_heads * shape.head_dim * shape.bytes_per_number
    print(f"{shape.weights / 1e9:.1f} G weights; {per_layer} bytes per token and layer of cache\n")
    print(table(shape, machine, given["gpus"]))


if __name__ == "__main__":
    main()
