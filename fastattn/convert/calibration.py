"""Run calibration text through a model layer by layer and gather the second moments of its attention inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fastattn.convert.families import AttentionSite, attention_sites, check_reading, decoder_of, read_weights
from fastattn.convert.statistics import SecondMoment

T = TypeVar("T")

BATCH_TOKENS = 2048
CHECKED_TOKENS = 32


@dataclass
class CalibrationStatistics:
    """Second moments of every attention input of a model, from one pass of the original (parallel statistics).

    ``moments``: by name of the attention module; ``tokens``: how many were fed; ``context``: the longest sequence.
    ``curvature``, ``batches``: what :func:`~fastattn.convert.calibrate_curvature` adds, by name, and the text.
    """

    moments: dict[str, SecondMoment]
    tokens: int
    context: int
    curvature: dict[str, Any] | None = None
    batches: list[Tensor] = field(default_factory=list)


class _Captured(Exception):
    """Ends a layer's forward once its attention has seen its input."""


def token_batches(name: str, token_ids: Tensor | Sequence[Tensor], model: nn.Module) -> list[Tensor]:
    """``token_ids`` (``[N, S]``, or a sequence of ``[S_i]``) as batches ``[B, S]`` on the model's device.

    Raises:
        TypeError, ValueError: not integer ids, empty, sequences below two tokens, or ids outside the vocabulary.
    """
    if isinstance(token_ids, Mapping) and "input_ids" in token_ids:
        raise TypeError(f'{name} must be token ids, got {type(token_ids).__name__}: pass its ["input_ids"]')
    if isinstance(token_ids, Tensor):
        if token_ids.dim() != 2:
            raise ValueError(f"{name} must have shape [sequences, tokens], got {list(token_ids.shape)}")
        sequences = list(token_ids)
    elif isinstance(token_ids, Sequence) and all(isinstance(ids, Tensor) for ids in token_ids):
        sequences = list(token_ids)
    else:
        got = type(token_ids).__name__
        if isinstance(token_ids, (list, tuple)):
            got = f"a {got} of {next(type(ids).__name__ for ids in token_ids if not isinstance(ids, Tensor))}"
        raise TypeError(f"{name} must be a tensor of token ids [sequences, tokens] or a list of [tokens], got {got}")
    if not sequences:
        raise ValueError(f"{name} must hold at least one sequence, got none")
    embedding: Any = model.get_input_embeddings()  # type: ignore[operator]
    for ids in sequences:
        if ids.dim() != 1 or ids.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{name} must hold int64 or int32 sequences [tokens], got {ids.dtype} {list(ids.shape)}")
        if ids.numel() < 2:
            raise ValueError(f"{name} must hold sequences of at least two tokens, got {ids.numel()}")
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= embedding.num_embeddings:
            raise ValueError(f"{name} must hold ids below {embedding.num_embeddings}, got {low}..{high}")
    batches: list[Tensor] = []
    group: list[Tensor] = []
    for ids in sequences:
        if group and (ids.numel() != group[0].numel() or (len(group) + 1) * ids.numel() > BATCH_TOKENS):
            batches.append(torch.stack(group))
            group = []
        group.append(ids)
    batches.append(torch.stack(group))
    return [batch.to(embedding.weight.device).long() for batch in batches]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Every submodule in eval mode, without gradients; modes are put back."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


def _first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The hidden states a layer or an attention module was called with."""
    return args[0] if args else kwargs["hidden_states"]


def _probe(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], check: Callable[[Tensor, Tensor], None]
) -> None:
    """Compare the layer at inputs that are far smaller and far larger than the text's.

    A step between projection and rotation that the text does not reach, such as a clip, shows there. The largest probe
    repeats one token: the values that are mixed are then all the same, however the scores round.
    """
    inputs = _first(args, kwargs)
    probes = [inputs * 1e-3, inputs[:, :1].expand_as(inputs) * 30]
    if inputs.dtype in (torch.float32, torch.float64) and not torch.is_autocast_enabled(inputs.device.type):
        probes.append(inputs * 8)
    others = {name: value for name, value in kwargs.items() if name != "hidden_states"}
    for probe in probes:
        output = module.forward(probe, *args[1:], **others)  # past the hooks, one of which this is called from
        check(probe[0, :CHECKED_TOKENS].detach(), output[0][0, :CHECKED_TOKENS].detach())


class LayerWalk:
    """Calibration text on its way through the layers: the inputs of one layer at a time, for every batch.

    Construction is one pass of the whole original: it refuses activations that are not finite, checks that the
    attention to be converted is read right, and keeps the first layer's inputs and what layers are called with.
    """

    def __init__(self, model: nn.Module, batches: list[Tensor], sites: list[AttentionSite]) -> None:
        self.model = model
        self.layers = list(decoder_of(model).layers)  # type: ignore[arg-type]
        self.hidden: list[Tensor] = []
        self.arguments: list[list[dict[str, Any]]] = []
        self._by_shape: dict[torch.Size, list[dict[str, Any]]] = {}
        for number, batch in enumerate(batches):
            self._run_original(batch, sites if number == 0 else [])

    def _run_original(self, batch: Tensor, to_check: list[AttentionSite]) -> None:
        calls: list[dict[str, Any]] = []
        checked = {site.attention: site for site in to_check}
        hooks = []

        def before_layer(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if module is self.layers[0]:
                self.hidden.append(_first(args, kwargs).detach())
            calls.append({name: value for name, value in kwargs.items() if name != "hidden_states"})

        def after_attention(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            inputs = _first(args, kwargs)
            if not bool(torch.isfinite(inputs).all()):
                raise ValueError(f"calibration activations must be finite, got NaN or infinity before {names[module]}")
            if module in checked:
                site = checked[module]
                shown = inputs[0, :CHECKED_TOKENS].detach()
                weights = read_weights(self.model, site)
                check_reading(weights, site, shown, output[0][0, :CHECKED_TOKENS].detach())
                _probe(module, args, kwargs, lambda *pair: check_reading(weights, site, *pair, probed=True))

        names = {site.attention: site.name for site in attention_sites(self.model)}
        try:
            for layer in self.layers:
                hooks.append(layer.register_forward_pre_hook(before_layer, with_kwargs=True))
                hooks.append(layer.self_attn.register_forward_hook(after_attention, with_kwargs=True))
            output = decoder_of(self.model)(input_ids=batch, use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()
        if not bool(torch.isfinite(output[0]).all()):
            raise ValueError("calibration activations must be finite, got NaN or infinity in the last hidden states")
        self.arguments.append(self._by_shape.setdefault(batch.shape, calls))

    def attention_moment(self, index: int, *, advance: bool) -> SecondMoment:
        """Second moment of the attention input of layer ``index``; with ``advance`` its outputs become the inputs."""
        layer = self.layers[index]
        moment = SecondMoment(self.hidden[0].shape[-1], self.hidden[0].device)

        def capture(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            moment.add(_first(args, kwargs))
            if not advance:
                raise _Captured

        hook = layer.self_attn.register_forward_pre_hook(capture, with_kwargs=True)
        try:
            for number in range(len(self.hidden)):
                try:
                    output = self._call(index, number)
                except _Captured:
                    continue
                self.hidden[number] = output
        finally:
            hook.remove()
        return moment

    def advance(self, index: int) -> None:
        """The outputs of layer ``index``, as the model holds it now, become the inputs."""
        for number in range(len(self.hidden)):
            self.hidden[number] = self._call(index, number)

    def _call(self, index: int, number: int) -> Tensor:
        output = self.layers[index](self.hidden[number], **self.arguments[number][index])
        return output[0] if isinstance(output, tuple) else output


@torch.inference_mode(False)
def calibrate(
    model: nn.Module, token_ids: Tensor | Sequence[Tensor], *, progress: bool = True
) -> CalibrationStatistics:
    """Statistics to convert a model from several times, each layer's from the original's activations.

    Memory: one float64 matrix ``[hidden+1, hidden+1]`` per layer, all kept.

    Args:
        model: a transformers decoder.
        token_ids: ``[N, S]`` int64, or a list of sequences ``[S_i]``; no padding.
        progress: show a progress bar.

    Returns:
        Statistics for :func:`fastattn.to_low_rank_` with ``statistics="parallel"``.

    Raises:
        TypeError, ValueError: token ids that do not fit, or a model without attention that could be converted.
    """
    batches = token_batches("calibration", token_ids, model)
    decoder: Any = decoder_of(model)
    moments: dict[str, SecondMoment] = {}
    hooks = []
    try:
        for site in attention_sites(model):
            moments[site.name] = SecondMoment(decoder.config.hidden_size, batches[0].device)
            hooks.append(site.attention.register_forward_pre_hook(_feed(moments[site.name]), with_kwargs=True))
        with evaluating(model):
            for batch in progress_bar(batches, "Calibrating", progress, unit="batch"):
                decoder(input_ids=batch, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return CalibrationStatistics(moments, sum(b.numel() for b in batches), max(b.shape[1] for b in batches))


def _feed(moment: SecondMoment) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
    return lambda module, args, kwargs: moment.add(_first(args, kwargs))


def progress_bar(items: Sequence[T], title: str, shown: bool, unit: str = "layer") -> Iterator[T]:
    """The items, counted on stderr."""
    if not shown:
        return iter(items)
    from tqdm import tqdm

    return iter(tqdm(items, desc=title, unit=unit))


def held_out_loss(model: nn.Module, token_ids: Tensor | Sequence[Tensor], name: str = "evaluation") -> float:
    """Mean negative log-likelihood (nats) of every next token, in float32 (float64 for a float64 model).

    Args:
        model: a transformers model with a language-model head.
        token_ids: ``[N, S]`` int64, or a list of sequences ``[S_i]``; no padding.
        name: what errors call ``token_ids``.

    Raises:
        TypeError, ValueError: token ids that do not fit.
    """
    total, count = 0.0, 0
    with evaluating(model):
        for batch in token_batches(name, token_ids, model):
            logits = model(input_ids=batch, use_cache=False).logits[:, :-1]
            logits = logits if logits.dtype == torch.float64 else logits.float()
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum")
            total, count = total + float(loss), count + batch[:, 1:].numel()
    return total / count
