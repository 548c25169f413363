"""Convert trained MHA/GQA attention into LowRankAttention, and save, load and export the result."""

from fastattn.convert.calibration import CalibrationStatistics, calibrate, held_out_loss
from fastattn.convert.config import LowRankConfig
from fastattn.convert.conversion import to_low_rank_
from fastattn.convert.report import ConversionReport, LayerReport

__all__ = [
    "CalibrationStatistics",
    "ConversionReport",
    "LayerReport",
    "LowRankConfig",
    "calibrate",
    "held_out_loss",
    "to_low_rank_",
]
