"""Convert trained MHA/GQA attention into LowRankAttention, and save, load and export the result.

- asked and answered: ``config``, ``report``
- the model as it comes: ``families`` (where its attention is, and whether it can be converted), ``weights`` (one layer
  as float64 matrices)
- the calibration text: ``calibration`` (its way through the layers), ``statistics`` (second moments),
  ``moment_source`` (where a conversion gets them from)
- the mathematics: ``rope`` (which directions keep a position), ``factors`` (the low-rank decomposition)
- the conversion: ``conversion``, ``attention`` (the module it puts in place), ``resume``, ``memory``
- afterwards: ``storage``, ``latent_norm``, ``deepseek_export``; ``deepseek`` (names of other checkpoints)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastattn.convert.calibration import CalibrationStatistics, calibrate, held_out_loss
    from fastattn.convert.config import LowRankConfig
    from fastattn.convert.conversion import to_low_rank_
    from fastattn.convert.deepseek import from_deepseek_names
    from fastattn.convert.deepseek_export import export_deepseek_v3
    from fastattn.convert.latent_norm import add_latent_norm_
    from fastattn.convert.report import ConversionReport, LayerReport
    from fastattn.convert.storage import load_low_rank, save_low_rank

# Public name -> module, loaded on first use.
_EXPORTS = {
    "CalibrationStatistics": "calibration",
    "ConversionReport": "report",
    "LayerReport": "report",
    "LowRankConfig": "config",
    "add_latent_norm_": "latent_norm",
    "calibrate": "calibration",
    "export_deepseek_v3": "deepseek_export",
    "from_deepseek_names": "deepseek",
    "held_out_loss": "calibration",
    "load_low_rank": "storage",
    "save_low_rank": "storage",
    "to_low_rank_": "conversion",
}

__all__ = [
    "CalibrationStatistics",
    "ConversionReport",
    "LayerReport",
    "LowRankConfig",
    "add_latent_norm_",
    "calibrate",
    "export_deepseek_v3",
    "from_deepseek_names",
    "held_out_loss",
    "load_low_rank",
    "save_low_rank",
    "to_low_rank_",
]


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        value = getattr(importlib.import_module(f"fastattn.convert.{_EXPORTS[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'fastattn.convert' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
