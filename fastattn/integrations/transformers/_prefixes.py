"""Stored prefixes: a prompt is compressed once, kept in a file, and continuations are scored from it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from tqdm import tqdm

from fastattn.integrations.transformers._cache import CompressedCache, switched
from fastattn.integrations.transformers._prefill import feed, whole_mask
from fastattn.modules.kv_cache import CompressedKVCache
from fastattn.modules.kv_cache.storage import load_cache
from fastattn.modules.policies import Policy
from fastattn.validation import check_count

# Entries of a configuration that change no key or value; the releases of transformers differ in them.
_NOT_OF_THE_MODEL = frozenset(
    {
        "architectures",
        "attn_implementation",
        "bos_token_id",
        "chunk_size_feed_forward",
        "dtype",
        "eos_token_id",
        "id2label",
        "label2id",
        "max_position_embeddings",
        "name_or_path",
        "pad_token_id",
        "return_dict",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)
_PARTS = ("class", "configuration", "weights")


class ContinuationScore(NamedTuple):
    """What :func:`score_continuations` says of one continuation.

    Attributes:
        log_likelihood: the sum of ``token_log_likelihoods``, in nats.
        is_greedy: every token is the likeliest of its step.
        token_log_likelihoods: ``log p(token | prefix, tokens before it)``, ``[T]`` on the CPU, float32 (float64 of a
            float64 model).
    """

    log_likelihood: float
    is_greedy: bool
    token_log_likelihoods: Tensor


def save_prefix(cache: CompressedCache, path: str | Path) -> None:
    """Write what ``cache`` holds to one file, for :func:`load_prefix` in any process and on any device.

    The file is :meth:`CompressedKVCache.save`'s. It also holds ``cache.next_logits`` where the prefix was fed with
    :func:`prefill`, and a fingerprint of the model: its class, its configuration, and a hash of the weights of every
    layer's attention.

    Args:
        cache: from :func:`compressed_cache`; its model must be alive.
        path: of the file.

    Raises:
        TypeError, ValueError: another cache, one of a model that has sliding-window layers (their windows are
            transformers' own and would be missing), or one whose model is gone.
        RuntimeError: the last call stopped half-way.
    """
    _check_cache("cache", cache)
    if cache.has_windows:
        raise ValueError(
            "cache must be of a model with full attention in every layer to be saved, got one with sliding windows"
        )
    decoder = cache._origin.decoder()
    if decoder is None:
        raise ValueError("cache must be saved while its model exists, which the file is to belong to: it is gone")
    extras = {} if cache.next_logits is None else {"next_logits": cache.next_logits}
    cache.kv._write(Path(path), json.dumps(_fingerprint(decoder), sort_keys=True), extras)


def load_prefix(
    model: Any, path: str | Path, batch_size: int | None = 1, *, policy: Policy | None = None
) -> CompressedCache:
    """A cache for ``model`` that goes on exactly as the one that :func:`save_prefix` wrote to ``path``.

    Args:
        model: the model that computed the prefix, on any device.
        path: of the file.
        batch_size: the one row that was saved is repeated as often; None for the rows that were saved.
        policy: in place of the saved one; needed where that is of a class that fastattn does not have.

    Raises:
        TypeError, ValueError: as :func:`compressed_cache`; a file that is damaged, altered, of a newer format, written
            by something else, or of another model.
    """
    hook = switched(model)
    saved = load_cache(Path(path), None)
    _check_fingerprint(saved.header["fingerprint"], _fingerprint(model.get_decoder()), saved.path)
    kv = CompressedKVCache._restored(saved, hook.spec.device, None, batch_size, policy)
    cache = CompressedCache(kv, hook, model)
    logits = saved.extra("next_logits")
    if logits is not None:
        cache.next_logits = logits.expand(kv.batch_size, -1).to(hook.spec.device)
    return cache


@torch.no_grad()
def score_continuations(
    model: Any,
    prefix: CompressedCache,
    continuations: Sequence[Sequence[int] | Tensor],
    *,
    batch_size: int = 16,
    chunk_size: int | None = None,
    next_logits: Tensor | None = None,
    progress: bool = True,
) -> list[ContinuationScore]:
    """The log-likelihood of each continuation after one prefix, which is computed once and stays as it is.

    ``batch_size`` copies of the prefix's row take the continuations, padded to a common length, in one call of the
    model (or one per ``chunk_size`` tokens). A continuation's tokens see all of the compressed prefix and, causally,
    each other: its score depends on no other continuation. Where nothing is evicted it is that of the whole text.

    Args:
        model: the model that ``prefix`` was made for.
        prefix: of one row, fed with :func:`prefill`, or from :func:`load_prefix`.
        continuations: token ids, at least one each, of any lengths: lists of integers or integer tensors ``[T]``.
        batch_size: continuations per call of the model.
        chunk_size: tokens of a continuation per call, each compressed before the next comes; by default all.
        next_logits: ``[vocabulary]`` or ``[1, vocabulary]``, the model's logits at the prefix's last token, where
            something else than :func:`prefill` fed it.
        progress: show a progress bar where there is more than one batch.

    Returns:
        A :class:`ContinuationScore` for each, in order.

    Raises:
        TypeError, ValueError: arguments that do not fit.
        RuntimeError: the last call of ``prefix`` stopped half-way.
    """
    _check_prefix(model, prefix)
    check_count("batch_size", batch_size, 1)
    if chunk_size is not None:
        check_count("chunk_size", chunk_size, 1)
    first = _first_logits(prefix, next_logits)
    tokens = _checked_tokens(continuations, first.shape[0])
    scores: list[ContinuationScore | None] = [None] * len(tokens)
    order = sorted(range(len(tokens)), key=lambda index: len(tokens[index]))  # neighbors of like length: little padding
    batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    for batch in tqdm(batches, unit="batch", desc="continuations", disable=not progress or len(batches) < 2):
        for index, score in zip(
            batch, _score_batch(model, prefix, first, [tokens[i] for i in batch], chunk_size), strict=True
        ):
            scores[index] = score
    return [score for score in scores if score is not None]


def _score_batch(
    model: Any, prefix: CompressedCache, first: Tensor, tokens: list[Tensor], chunk_size: int | None
) -> list[ContinuationScore]:
    """Of ``tokens``, in a copy of ``prefix`` for each; ``first`` are the logits at the prefix's last token."""
    rows = [_Row(own) for own in tokens]
    for row in rows:
        row.add(first[None])
    longest = max(len(own) for own in tokens) - 1  # nothing follows the last token
    if longest:
        copies = prefix.fork(torch.zeros(len(rows), dtype=torch.int64, device=prefix.kv.device))
        size, device = chunk_size or longest, model.get_input_embeddings().weight.device
        # A call as narrow as a decode step would compress what is full before it attends: only where all are.
        least = 0 if chunk_size is not None and chunk_size <= prefix.kv.max_step else prefix.kv.max_step + 1
        mask = None
        for start in range(0, longest, size):
            stop = min(start + size, longest)
            ids, real = _chunk(tokens, start, max(stop, start + least), device)
            before = int(copies.kv.columns)
            mask = whole_mask(real, before, ids, copies) if mask is None else torch.cat([mask, real], 1)
            logits = feed(model, ids, copies, mask)
            for index, row in enumerate(rows):
                row.add(logits[index, : max(0, min(stop, len(tokens[index]) - 1) - start)])
    return [row.score() for row in rows]


def _chunk(tokens: list[Tensor], start: int, stop: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Ids and mask ``[B, stop - start]`` of ``tokens[start:stop]``, the last of each left out."""
    ids = torch.zeros(len(tokens), stop - start, dtype=torch.int64)
    real = torch.zeros_like(ids)
    for row, own in enumerate(tokens):
        fed = own[:-1][start:stop]
        ids[row, : len(fed)] = fed
        real[row, : len(fed)] = 1
    return ids.to(device), real.to(device)


class _Row:
    """What is known of one continuation so far."""

    def __init__(self, tokens: Tensor) -> None:
        self.tokens, self.is_greedy, self.scored = tokens, True, 0
        self.parts: list[Tensor] = []

    def add(self, logits: Tensor) -> None:
        """The logits ``[T, vocabulary]`` that the next ``T`` tokens were chosen by."""
        tokens = self.tokens[self.scored : self.scored + len(logits)].to(logits.device)
        wide = logits if logits.dtype == torch.float64 else logits.float()
        self.parts.append((wide.gather(1, tokens[:, None])[:, 0] - wide.logsumexp(1)).cpu())
        self.is_greedy = self.is_greedy and bool((wide.argmax(1) == tokens).all())
        self.scored += len(tokens)

    def score(self) -> ContinuationScore:
        known = torch.cat(self.parts)
        return ContinuationScore(float(known.double().sum()), self.is_greedy, known)


# -- checks ----------------------------------------------------------------------------------------------------------


def _check_cache(name: str, cache: object) -> None:
    if not isinstance(cache, CompressedCache):
        raise TypeError(f"{name} must come from compressed_cache or load_prefix, got {type(cache).__name__}")


def _check_prefix(model: Any, prefix: CompressedCache) -> None:
    """One row of something, that ``model`` computed."""
    _check_cache("prefix", prefix)
    if prefix.batch_size != 1:
        raise ValueError(f"prefix must have one row, got {prefix.batch_size}: batch_select_indices or fork takes one")
    if int(prefix.kv.tokens_seen.amin()) == 0:
        raise ValueError("prefix must hold at least one token, got none: feed it with prefill")
    decoder = prefix._origin.decoder()
    if decoder is not None and decoder is not model.get_decoder():
        raise ValueError("model must be the one that prefix was made for, got another: load_prefix(model, path) checks")


def _first_logits(prefix: CompressedCache, given: Tensor | None) -> Tensor:
    """Logits ``[vocabulary]`` at the prefix's last token."""
    logits = prefix.next_logits if given is None else given
    if logits is None:
        raise ValueError(
            "next_logits must be given where prefix was not fed with prefill last: without the logits at its last "
            "token the first token of a continuation has no score"
        )
    if not isinstance(logits, Tensor):
        raise TypeError(f"next_logits must be a tensor, got {type(logits).__name__}")
    if logits.dim() not in (1, 2) or logits.numel() != logits.shape[-1] or not logits.is_floating_point():
        raise ValueError(f"next_logits must be floats [vocabulary], got {list(logits.shape)} {logits.dtype}")
    return logits.reshape(-1)


def _checked_tokens(continuations: object, vocabulary: int) -> list[Tensor]:
    """Each continuation as int64 ``[T]`` on the CPU."""
    if isinstance(continuations, (str, bytes, Tensor)) or not isinstance(continuations, Sequence):
        raise TypeError(
            f"continuations must be a sequence of sequences of token ids, got {type(continuations).__name__}"
        )
    return [_checked_ids(f"continuations[{index}]", ids, vocabulary) for index, ids in enumerate(continuations)]


def _checked_ids(name: str, ids: object, vocabulary: int) -> Tensor:
    if not isinstance(ids, Tensor):
        if isinstance(ids, (str, bytes)) or not isinstance(ids, Iterable):
            raise TypeError(f"{name} must be a sequence of token ids, got {type(ids).__name__}")
        ids = list(ids)
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int):
                raise TypeError(f"{name} must hold integers, got {type(token).__name__}")
        ids = torch.tensor(ids, dtype=torch.int64)
    if ids.dim() != 1 or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise ValueError(f"{name} must be integers [T], got {list(ids.shape)} {ids.dtype}")
    if ids.numel() == 0:
        raise ValueError(f"{name} must hold at least one token, got none")
    ids = ids.to("cpu", torch.int64)
    if int(ids.amin()) < 0 or int(ids.amax()) >= vocabulary:
        raise ValueError(f"{name} must hold ids in 0..{vocabulary - 1}, got {int(ids.amin())}..{int(ids.amax())}")
    return ids


# -- which model ------------------------------------------------------------------------------------------------------


def _fingerprint(decoder: nn.Module) -> dict[str, str]:
    """What decides keys and values: class, configuration, weights of attention."""
    config: dict[str, Any] = decoder.config.to_dict()  # type: ignore[operator, union-attr]
    told = {name: value for name, value in config.items() if _tells(name, value)}
    text = json.dumps(told, sort_keys=True, default=str)
    return {
        "class": type(decoder).__name__,
        "configuration": hashlib.sha256(text.encode()).hexdigest()[:16],
        "weights": _attention_hash(decoder)[:16],
    }


def _tells(name: str, value: object) -> bool:
    """A new release's further options are off by default: they are passed over, as what is not of the model."""
    off = value is None or value is False or value in ({}, [], ())
    return not (off or name.startswith(("_", "output_")) or name in _NOT_OF_THE_MODEL)


def _attention_hash(decoder: nn.Module) -> str:
    """A hash of all weights of the modules that cache something, in order."""
    digest = hashlib.sha256()
    for name, module in decoder.named_modules():
        if getattr(module, "layer_idx", None) is None or not hasattr(module, "forward"):
            continue
        if any(getattr(child, "layer_idx", None) is not None for child in list(module.modules())[1:]):
            continue  # a whole decoder layer that knows its index; its attention comes
        for part, tensor in sorted(module.state_dict().items()):
            if isinstance(tensor, Tensor):
                digest.update(f"{name}.{part} {tensor.dtype} {list(tensor.shape)}".encode())
                digest.update(_bytes(tensor))
    return digest.hexdigest()


def _bytes(tensor: Tensor) -> bytes:
    """What ``tensor`` holds; of a subclass (quantized weights) what it is made of."""
    if type(tensor) not in (Tensor, nn.Parameter) and hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        return b"".join(_bytes(getattr(tensor, name)) for name in names)
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def _check_fingerprint(saved: str, own: dict[str, str], path: Path) -> None:
    """The file is a prefix, of this model."""
    try:
        told = json.loads(saved)
    except ValueError:
        told = None
    if not isinstance(told, dict) or set(told) != set(_PARTS):
        raise ValueError(f"path must be a file that save_prefix wrote, got {path} with the fingerprint {saved!r}")
    differ = [f"{part} {told[part]}, got {own[part]}" for part in _PARTS if told[part] != own[part]]
    if differ:
        raise ValueError(f"model must be the one that computed {path}: it was saved with {'; '.join(differ)}")
