"""Low-rank attention: the module, its four paths, the absorbed up-projection, its rotation and its argument checks."""

from fastattn.modules.low_rank.layers import INIT_STD, LatentNorm, Projection
from fastattn.modules.low_rank.module import LowRankAttention

__all__ = ["INIT_STD", "LatentNorm", "LowRankAttention", "Projection"]
