"""The model type ``fastattn`` of lm_eval, the evaluation harness: Hugging Face models over compressed caches.

Importing this module registers it. From a shell, where nothing else would::

    python -m fastattn.integrations.lm_eval run --model fastattn --tasks ... \\
        --model_args pretrained=...,policy=expected_attention,budget=512,chunk_size=256

Needs ``pip install "fastattn[lm-eval]"``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from torch import Tensor
from tqdm import tqdm

from fastattn.integrations.transformers import CompressedCache, compressed_cache, prefill, score_continuations
from fastattn.modules.policies import Policy
from fastattn.validation import check_count


@register_model("fastattn")
class FastattnLM(HFLM):  # type: ignore[misc]  # lm_eval has no types
    """The harness's own ``hf`` model, over a compressed cache.

    A context is fed in chunks, each compressed before the next comes, and what follows it is scored or generated from
    what is left. Requests with the same context (the choices of a question) share it: it is fed once. Where nothing is
    evicted, results are those of ``hf``.

    ``loglikelihood_rolling`` has nothing before its text: what is compressed are the chunks of the text itself, so that
    ``chunk_size`` decides how much of it is scored over a compressed cache.

    Args:
        pretrained: as ``hf`` takes it.
        policy: as :func:`compressed_cache` takes it; on a command line one of the names.
        budget: tokens kept per row, layer and head.
        interval: decode steps between two compressions.
        storage: ``"int8"``, ``"fp8"`` or ``"int4"`` for quantised keys and values.
        chunk_size: tokens per call of the model, of contexts and of what follows them.
        batch_size: a number; ``auto`` is not served.
        options: of ``hf``: ``tokenizer``, ``dtype``, ``device``, ``max_length`` and so on. Log-softmax is always taken
            in float32, whatever ``softmax_dtype`` says.

    Raises:
        TypeError, ValueError: an argument of another type or range, or a model that cannot be served.
    """

    def __init__(
        self,
        pretrained: Any,
        policy: Policy | str = "key_diff",
        budget: int | Sequence[int] = 1024,
        interval: int = 128,
        storage: str | None = None,
        chunk_size: int = 2048,
        batch_size: int | str | None = 1,
        **options: Any,
    ) -> None:
        check_count("chunk_size", chunk_size, 1)
        if isinstance(batch_size, str) and not batch_size.isdigit():
            raise ValueError(f"batch_size must be a number for the model type fastattn, got {batch_size!r}")
        super().__init__(pretrained=pretrained, batch_size=batch_size, **options)
        self.chunk_size = chunk_size
        self._cache_options: dict[str, Any] = {
            "policy": policy,
            "budget": budget,
            "interval": interval,
            "storage": storage,
        }
        self._new_cache()  # wrong options are noticed now

    def _new_cache(self) -> CompressedCache:
        return compressed_cache(self.model, **self._cache_options)

    def _autocast(self) -> torch.autocast:
        wanted = self.mixed_precision_dtype
        return torch.autocast(device_type=self.device.type, dtype=wanted, enabled=wanted is not None)

    @torch.no_grad()
    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[Any, list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        """Log-likelihood of each continuation, and whether it is the greedy one."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for index, (_, context, continuation) in enumerate(requests):
            room = self.max_length + 1 - len(continuation)  # as `hf` cuts them
            groups.setdefault(tuple(context[-room:]), []).append(index)
        results: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        cache = self._new_cache()
        off = disable_tqdm or self.rank != 0
        with self._autocast(), tqdm(total=len(requests), disable=off, desc="loglikelihood over a cache") as bar:
            for prefix in sorted(groups, key=len, reverse=True):  # what needs most memory comes first
                cache.reset()
                ids = torch.tensor([prefix], device=self.device)
                prefill(self.model, ids, cache, self.chunk_size, progress=False)
                members = groups[prefix]
                scores = score_continuations(
                    self.model,
                    cache,
                    [requests[index][2] for index in members],
                    batch_size=override_bs or int(self.batch_size),
                    chunk_size=self.chunk_size,
                    progress=False,
                )
                for index, score in zip(members, scores, strict=True):
                    results[index] = (score.log_likelihood, score.is_greedy)
                    if requests[index][0] is not None:
                        self.cache_hook.add_partial("loglikelihood", requests[index][0], results[index])
                bar.update(len(members))
        return results

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **options: Any) -> Any:
        """``hf``'s generation from a cache that has been fed all of ``context`` but at most one chunk."""
        columns = context.shape[1]
        cache = self._new_cache()
        mask = options.get("attention_mask")
        fed = (columns - 1) // self.chunk_size * self.chunk_size
        if fed:
            with self._autocast():
                seen = None if mask is None else mask[:, :fed]
                prefill(self.model, context[:, :fed], cache, self.chunk_size, seen, progress=False)
            copies = max(options.get("num_beams") or 1, options.get("num_return_sequences") or 1)
            if copies > 1:
                cache.batch_repeat_interleave(copies)
        return super()._model_generate(context, max_length, stop, past_key_values=cache, **options)


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
