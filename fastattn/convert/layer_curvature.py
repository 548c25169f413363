"""What the curvature says of every layer, gathered once for any ranks and rotary dims."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fastattn.convert.calibration import CalibrationStatistics, calibrate, evaluating, token_batches
from fastattn.convert.curvature import MINIMUM_SEQUENCES, Curvature, check_differentiable, fit_curvature
from fastattn.convert.families import AttentionSite, attention_sites, check_site
from fastattn.convert.gradients import LayerGradients, gather_gradients


@dataclass(frozen=True)
class LayerCurvature:
    """Curvature of one layer.

    Attributes:
        key_value: of the projections ``[K; V]``, keys scored without position.
        rotated, unrotated: complex64 ``[S, F, Hkv, Hkv]``, see :class:`~fastattn.convert.gradients.LayerGradients`.
        query: of the query projection, if it was gathered.
    """

    key_value: Curvature
    rotated: Tensor
    unrotated: Tensor
    query: Curvature | None = None

    def tensors(self) -> dict[str, Tensor]:
        """All of it by name, in real dtypes."""
        found = {
            "latent": self.key_value.latent,
            "inputs": self.key_value.inputs,
            "rotated": torch.view_as_real(self.rotated),
            "unrotated": torch.view_as_real(self.unrotated),
        }
        if self.query is not None:
            found |= {"query_latent": self.query.latent, "query_inputs": self.query.inputs}
        return found

    @classmethod
    def from_tensors(cls, found: dict[str, Tensor], device: torch.device) -> LayerCurvature:
        """The inverse of :meth:`tensors`."""
        found = {name: value.to(device) for name, value in found.items()}
        query = Curvature(found["query_latent"], found["query_inputs"]) if "query_latent" in found else None
        return cls(
            Curvature(found["latent"], found["inputs"]),
            torch.view_as_complex(found["rotated"].contiguous()),
            torch.view_as_complex(found["unrotated"].contiguous()),
            query,
        )


def fit_layer(gradients: LayerGradients, moment: Tensor) -> LayerCurvature:
    """The curvature that one layer's gradients, with the second moment of its inputs, stand for."""
    device = moment.device
    return LayerCurvature(
        key_value=fit_curvature([g.to(device) for g in gradients.key_value], moment),
        rotated=torch.stack(gradients.rotated).to(device),
        unrotated=torch.stack(gradients.unrotated).to(device),
        query=fit_curvature([g.to(device) for g in gradients.query], moment) if gradients.query else None,
    )


def gather_curvature(
    model: nn.Module,
    sites: list[AttentionSite],
    batches: list[Tensor],
    moments: dict[str, Tensor],
    *,
    with_query: bool,
    progress: bool,
) -> dict[str, LayerCurvature]:
    """The curvature of every layer in ``sites``, by name."""
    gathered = gather_gradients(model, sites, batches, with_query=with_query, progress=progress)
    return {site.name: fit_layer(gathered.pop(0), moments[site.name]) for site in sites}


def check_text(sequences: int) -> None:
    """Refuse text of too few sequences.

    Raises:
        ValueError: it is.
    """
    if sequences < MINIMUM_SEQUENCES:
        raise ValueError(f'calibration must hold {MINIMUM_SEQUENCES} sequences for "curvature", got {sequences}')


@torch.inference_mode(False)
def calibrate_curvature(
    model: nn.Module,
    token_ids: Tensor | Sequence[Tensor],
    *,
    with_query: bool = False,
    progress: bool = True,
) -> CalibrationStatistics:
    """Statistics to convert a model by curvature several times: one backward pass per sequence serves all of them.

    They hold what :func:`calibrate`'s do, each layer's curvature and the text itself (for ``refit``), and can be kept
    with ``torch.save``. Memory while gathering: per layer and sequence ``2 kv_heads head_dim (hidden + 1)`` gradients
    in bfloat16 (float32 of a float64 model); afterwards about four float64 matrices ``[hidden, hidden]`` per layer.

    Args:
        model: a transformers decoder with a language-model head, float weights, on one device.
        token_ids: ``[N, S]`` int64, or a list of sequences ``[S_i]``, at least four; no padding.
        with_query: gather the query's curvature too, which a conversion with ``q_lora_rank`` needs.
        progress: show a progress bar.

    Raises:
        TypeError, ValueError: token ids that do not fit, fewer than four sequences, a model that can't give gradients.
    """
    batches = token_batches("calibration", token_ids, model)
    check_text(sum(len(batch) for batch in batches))
    check_differentiable(model)
    sites = attention_sites(model)
    for site in sites:
        check_site(model, site)
    statistics = calibrate(model, token_ids, progress=progress)
    moments = {name: moment.mean() for name, moment in statistics.moments.items()}
    with evaluating(model):
        statistics.curvature = gather_curvature(
            model, sites, batches, moments, with_query=with_query, progress=progress
        )
    statistics.batches = batches
    return statistics
