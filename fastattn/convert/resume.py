"""Finished layers of a conversion on disk, so that an interrupted one goes on where it was."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fastattn.convert.config import LowRankConfig
from fastattn.convert.families import decoder_of
from fastattn.convert.report import LayerReport

SAMPLES = 64
OF_NO_CONSEQUENCE = {"transformers_version", "architectures", "dtype", "use_cache"}


@dataclass(frozen=True)
class SavedLayer:
    """A finished layer as it was stored."""

    arguments: dict[str, Any]
    inv_freq: Tensor
    state: dict[str, Tensor]
    row: dict[str, Any]


class ResumeState:
    """One file per finished layer in ``folder``, and one that says which conversion they belong to.

    Raises:
        ValueError: the folder belongs to another model, configuration or calibration.
    """

    def __init__(
        self, folder: Path, model: nn.Module, config: LowRankConfig, layers: list[str], calibration: list[Any]
    ) -> None:
        self.folder = folder
        described = json.dumps([config.as_dict(), layers, calibration, _settings(model), _model_digest(model)])
        fingerprint = hashlib.sha256(described.encode()).hexdigest()
        marker = folder / "conversion.json"
        if marker.exists():
            found = json.loads(marker.read_text(encoding="utf-8")).get("fingerprint")
            if found != fingerprint:
                raise ValueError(
                    f"resume_dir must be empty or of the same model, configuration and calibration, got {folder}"
                )
            return
        folder.mkdir(parents=True, exist_ok=True)
        _write(marker, json.dumps({"fingerprint": fingerprint, "config": config.as_dict()}).encode())

    def save(
        self, name: str, arguments: dict[str, Any], inv_freq: Tensor, state: dict[str, Tensor], row: LayerReport
    ) -> None:
        """Store a finished layer, whole or not at all."""
        from safetensors.torch import save

        described = {"arguments": json.dumps(arguments), "row": json.dumps(asdict(row))}
        tensors = {key: value.detach().cpu().contiguous() for key, value in state.items()}
        tensors["__inv_freq__"] = inv_freq.cpu().contiguous().clone()
        _write(self._path(name), save(tensors, metadata=described))

    def load(self, name: str) -> SavedLayer | None:
        """A layer finished before, or ``None``."""
        path = self._path(name)
        if not path.exists():
            return None
        from safetensors import safe_open

        with safe_open(path, framework="pt") as file:
            described = file.metadata()
            state = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a dict)
        inv_freq = state.pop("__inv_freq__")
        return SavedLayer(json.loads(described["arguments"]), inv_freq, state, json.loads(described["row"]))

    def save_tensors(self, name: str, tensors: dict[str, Tensor]) -> None:
        """Store what layers share, whole or not at all."""
        from safetensors.torch import save

        _write(self._path(name), save({key: value.cpu().contiguous() for key, value in tensors.items()}))

    def load_tensors(self, name: str) -> dict[str, Tensor] | None:
        """What :meth:`save_tensors` stored, or ``None``."""
        from safetensors.torch import load_file

        path = self._path(name)
        return load_file(path) if path.exists() else None

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"


def _write(path: Path, content: bytes) -> None:
    """Atomically: readers see the old file or the new one."""
    draft = path.with_suffix(path.suffix + ".partial")
    draft.write_bytes(content)
    os.replace(draft, path)


def _settings(model: nn.Module) -> list[Any]:
    """What the model computes besides its weights: a layer's inputs depend on rotation, scales and activations."""
    config: Any = decoder_of(model).config
    settings = config.to_dict()
    kept = [key for key in sorted(settings) if not key.startswith("_") and key not in OF_NO_CONSEQUENCE]
    return [type(model).__name__, *((key, repr(settings[key])) for key in kept)]


def _model_digest(model: nn.Module) -> str:
    """Changes with the model's weights: hashes evenly spaced samples of every parameter."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        flat = parameter.detach().flatten()
        samples = flat[:: max(1, flat.numel() // SAMPLES)].cpu().contiguous().view(torch.uint8)
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
        digest.update(samples.numpy().tobytes())
    return digest.hexdigest()
