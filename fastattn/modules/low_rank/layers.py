"""The layers that low-rank attention consists of: projections initialized as DeepSeek's, and the norm on a latent."""

from __future__ import annotations

import torch
from torch import Tensor, nn

INIT_STD = 0.02  # initializer_range of the DeepSeek-V2 and V3 configurations


class LatentNorm(nn.RMSNorm):
    """RMSNorm computed in the wider of its input's and its weight's dtypes and returned in the input's."""

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, self.weight.dtype)  # under autocast the weight stays float32
        return super().forward(x.to(wide)).to(x.dtype)


class Projection(nn.Linear):
    """A linear layer initialized as the DeepSeek models' layers are: normal weight, bias of zero."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=INIT_STD)
        if self.bias is not None:
            nn.init.zeros_(self.bias)
