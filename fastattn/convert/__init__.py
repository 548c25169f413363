"""Convert trained MHA/GQA attention into LowRankAttention, and save, load and export the result.

- asked and answered: ``config``, ``report``
- the model as it comes: ``families`` (where its attention is, and whether it can be converted), ``weights`` (one layer
  as float64 matrices)
- the calibration text: ``calibration`` (its way through the layers), ``statistics`` (second moments),
  ``moment_source`` (where a conversion gets them from)
- the mathematics: ``rope`` (which directions keep a position), ``factors`` (the low-rank decomposition)
- by the loss's curvature: ``gradients``, ``curvature`` (Kronecker factors, directions), ``layer_curvature`` (of a
  model's layers), ``rope_gradient`` (what keeps RoPE), ``allocation`` (ranks per layer), ``joint_allocation`` (ranks
  and rope dims per layer), ``refit`` (output projections), ``curvature_conversion`` (all of it for a model)
- the conversion: ``conversion``, ``layer`` (one layer's plan, module and report),
  ``attention`` (the module it puts in place), ``resume``, ``memory``
- afterwards: ``storage``, ``latent_norm``, ``deepseek_export``; ``deepseek`` (names of other checkpoints)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastattn._lazy import lazy_exports

if TYPE_CHECKING:  # for type checkers, which do not read the table below
    from fastattn.convert.calibration import CalibrationStatistics as CalibrationStatistics
    from fastattn.convert.calibration import calibrate as calibrate
    from fastattn.convert.calibration import held_out_loss as held_out_loss
    from fastattn.convert.config import LowRankConfig as LowRankConfig
    from fastattn.convert.conversion import to_low_rank_ as to_low_rank_
    from fastattn.convert.deepseek import from_deepseek_names as from_deepseek_names
    from fastattn.convert.deepseek_export import export_deepseek_v3 as export_deepseek_v3
    from fastattn.convert.latent_norm import add_latent_norm_ as add_latent_norm_
    from fastattn.convert.layer_curvature import calibrate_curvature as calibrate_curvature
    from fastattn.convert.report import ConversionReport as ConversionReport
    from fastattn.convert.report import LayerReport as LayerReport
    from fastattn.convert.storage import load_low_rank as load_low_rank
    from fastattn.convert.storage import save_low_rank as save_low_rank

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "fastattn.convert.calibration": ("CalibrationStatistics", "calibrate", "held_out_loss"),
        "fastattn.convert.config": ("LowRankConfig",),
        "fastattn.convert.conversion": ("to_low_rank_",),
        "fastattn.convert.deepseek": ("from_deepseek_names",),
        "fastattn.convert.deepseek_export": ("export_deepseek_v3",),
        "fastattn.convert.latent_norm": ("add_latent_norm_",),
        "fastattn.convert.layer_curvature": ("calibrate_curvature",),
        "fastattn.convert.report": ("ConversionReport", "LayerReport"),
        "fastattn.convert.storage": ("load_low_rank", "save_low_rank"),
    },
)
