"""A cache in a file: safetensors, cut to what is filled, with a header that says what it is."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastattn.modules import policies
from fastattn.modules.kv_cache.buffers import Buffer
from fastattn.modules.policies import Policy
from fastattn.modules.rotary import Rotary

FORMAT = "fastattn.kv_cache"
VERSION = 2  # 1 is written where layers have neither a window nor a rotation or widths of their own
_ROTARY = "rotary.inv_freq"
_EXTRA = "extra."  # begins the names of tensors that are no buffers
_LAYER_ROTARY = "rotary.{}.inv_freq"


def save_cache(
    path: Path,
    arguments: dict[str, Any],
    rotary: Rotary | list[Rotary] | None,
    buffers: dict[str, tuple[Buffer, Tensor]],
    fingerprint: str,
    extras: dict[str, Tensor],
) -> None:
    """Write ``buffers``, the ``arguments`` of their cache and ``extras`` to ``path``, by way of a temporary name."""
    if not isinstance(fingerprint, str):
        raise TypeError(f"fingerprint must be a string, got {type(fingerprint).__name__}")
    tensors = {name: _filled(buffer, tensor, name, buffers) for name, (buffer, tensor) in buffers.items()}
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    widths = (arguments["head_dim"], arguments["v_head_dim"], arguments["latent_rank"])
    by_layer = isinstance(rotary, list) or arguments["window"] is not None or any(isinstance(w, tuple) for w in widths)
    unsaid = ("policy",) if by_layer else ("policy", "window")
    header = {
        "arguments": {name: value for name, value in arguments.items() if name not in unsaid},
        "policy": _described(arguments["policy"]),
        "rotary": [_rotary_options(one) for one in rotary] if isinstance(rotary, list) else _rotary_options(rotary),
        "shapes": {name: list(tensor.shape) for name, (_, tensor) in buffers.items()},
        "storage": arguments["storage"],
        "tokens_seen": buffers["tokens_seen"][1].tolist(),
        "fingerprint": fingerprint,
    }
    if isinstance(rotary, list):
        tensors |= {
            _LAYER_ROTARY.format(layer): one.inv_freq.detach().cpu().clone() for layer, one in enumerate(rotary)
        }
    elif rotary is not None:
        tensors[_ROTARY] = rotary.inv_freq.detach().cpu().contiguous()
    tensors |= {_EXTRA + name: tensor.detach().cpu().contiguous() for name, tensor in extras.items()}
    text = json.dumps(header, sort_keys=True)
    version = str(VERSION if by_layer else 1)
    metadata = {"format": FORMAT, "version": version, "header": text, "sha256": _digest(tensors, text)}
    _write(path, tensors, metadata)


def load_cache(path: Path, fingerprint: str | None) -> SavedCache:
    """What ``path`` holds, checked.

    Raises:
        ValueError: not a cache's file, damaged, altered, of a newer format, or with another fingerprint.
    """
    tensors, metadata = _read(path)
    if metadata.get("format") != FORMAT:
        raise ValueError(f"path must be a file that CompressedKVCache.save wrote, got {path}")
    if int(metadata["version"]) > VERSION:
        raise ValueError(
            f"path must be of format version {VERSION} or older, got version {metadata['version']} in {path}: a newer "
            "fastattn wrote it"
        )
    if _digest(tensors, metadata["header"]) != metadata["sha256"]:
        raise ValueError(f"path must be an unaltered file, but {path} does not hold what was saved: its hash differs")
    header = json.loads(metadata["header"])
    if fingerprint is not None and header["fingerprint"] != fingerprint:
        raise ValueError(
            f"fingerprint must be the one that the cache was saved with, {header['fingerprint']!r}, got "
            f"{fingerprint!r}: another model computed its keys"
        )
    return SavedCache(path, header, tensors)


@dataclass
class SavedCache:
    """What a file holds."""

    path: Path
    header: dict[str, Any]
    tensors: dict[str, Tensor]

    def extra(self, name: str) -> Tensor | None:
        """What was saved beside the buffers as ``name``, None where nothing was."""
        return self.tensors.get(_EXTRA + name)

    def arguments(self, policy: Policy | None) -> dict[str, Any]:
        """Keyword arguments of a cache like the saved one, with ``policy`` in place of its own where given."""
        arguments = dict(self.header["arguments"])
        arguments["dtype"] = getattr(torch, arguments["dtype"])
        arguments["policy"] = _restored(self.header["policy"], self.path) if policy is None else policy
        options = self.header["rotary"]
        if isinstance(options, list):
            names = [_LAYER_ROTARY.format(layer) for layer in range(len(options))]
            arguments["rotary"] = [Rotary(self.tensors[n], **one) for n, one in zip(names, options, strict=True)]
        else:
            arguments["rotary"] = None if options is None else Rotary(self.tensors[_ROTARY], **options)
        return arguments

    def fill_(self, name: str, buffer: Buffer, tensor: Tensor) -> None:
        """Write what was saved as ``name`` into ``tensor``, whose one saved row may be repeated."""
        saved = self.tensors.get(name)
        if saved is None:  # a query window that was not allocated yet, or of a policy put in place of the saved one
            return
        if buffer.per_slot:
            tensor = tensor[:, :, : saved.shape[2]]
        tensor.copy_(saved)  # one row is broadcast


def _filled(buffer: Buffer, tensor: Tensor, name: str, buffers: dict[str, tuple[Buffer, Tensor]]) -> Tensor:
    """``tensor`` without the slots that no row and head has filled."""
    if not buffer.per_slot:
        return tensor
    lengths = buffers[name.rpartition(".")[0] + ".lengths"][1]
    return tensor[:, :, : int(lengths.max())]


def _rotary_options(rotary: Rotary | None) -> dict[str, Any] | None:
    return (
        None
        if rotary is None
        else {
            "interleave": rotary.interleave,
            "attention_factor": rotary.attention_factor,
            "start": rotary.start,
        }
    )


def _described(policy: Policy) -> dict[str, Any]:
    """The class and options of ``policy``, as JSON has them."""
    options: dict[str, Any] = {}
    if dataclasses.is_dataclass(policy):
        for field in dataclasses.fields(policy):
            value = getattr(policy, field.name)
            options[field.name] = _described(value) if isinstance(value, Policy) else value
    return {"class": type(policy).__name__, "options": options, "ours": _class_of_ours(type(policy).__name__)}


def _class_of_ours(name: str) -> bool:
    found = getattr(policies, name, None)
    return isinstance(found, type) and issubclass(found, Policy)


def _restored(described: dict[str, Any], path: Path) -> Policy:
    """The policy that :func:`_described` described."""
    name = described["class"]
    if not described["ours"] or not _class_of_ours(name):
        raise ValueError(
            f"policy must be given to load {path}: it was saved with a {name}, which fastattn does not have"
        )
    options = {
        option: _restored(value, path) if isinstance(value, dict) and "class" in value else value
        for option, value in described["options"].items()
    }
    policy: Policy = getattr(policies, name)(**options)
    return policy


def _digest(tensors: dict[str, Tensor], header: str) -> str:
    """A hash of everything that a file holds."""
    digest = hashlib.sha256(header.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b"")
    return digest.hexdigest()


def _write(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    safetensors = _safetensors()
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    os.close(handle)
    try:
        safetensors.torch.save_file(tensors, temporary, metadata=metadata)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    safetensors = _safetensors()
    if not path.is_file():
        raise ValueError(f"path must be a file that CompressedKVCache.save wrote, got {path}, which is none")
    try:
        with safetensors.safe_open(str(path), framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
            return tensors, dict(file.metadata() or {})
    except Exception as error:  # safetensors has an exception class of its own
        raise ValueError(
            f"path must be a whole safetensors file, but {path} is truncated or damaged ({error})"
        ) from error


def _safetensors() -> Any:
    try:
        import safetensors
        import safetensors.torch
    except ImportError as error:
        raise ImportError(
            'saving and loading caches needs the package safetensors: pip install "fastattn[transformers]"'
        ) from error
    return safetensors
