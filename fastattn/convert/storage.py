"""Converted models on disk: a folder like transformers' own, swapped in whole."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fastattn.convert.attention import ConvertedAttention
from fastattn.convert.conversion import CONFIG_ENTRY
from fastattn.convert.families import decoder_of, fresh_rotary

WEIGHTS = "low_rank.safetensors"
INDEX = "model.safetensors.index.json"
# The file that the index of a folder names, which is not there: what else reads the folder fails, and names it.
LOADER = "load-this-folder-with-fastattn.convert.load_low_rank.safetensors"


def save_low_rank(model: nn.Module, path: str | Path) -> None:
    """Write a converted model to the folder ``path``: ``config.json`` with an entry of its attention, and the weights.

    The weights are called ``low_rank.safetensors``, and the index that ``from_pretrained`` reads names a missing file
    whose name says what loads the folder: it fails instead of filling the projections it misses with random numbers.
    The folder is written beside ``path`` and renamed: what is there is
    the old model or the new one, never a mixture. Other files in it, such as a tokenizer's, stay.

    Args:
        model: converted by :func:`fastattn.to_low_rank_`.
        path: the folder.

    Raises:
        ValueError: the model is not a converted one of transformers' classes, its weights are not there (the meta
            device), or ``path`` is a file. Nothing is written then.
    """
    from safetensors.torch import save_file

    config = _converted_config(model)
    with replaced_folder(Path(path)) as draft:
        config.save_pretrained(draft)
        generation = getattr(model, "generation_config", None)
        if generation is not None:
            generation.save_pretrained(draft)
        state = untied(model.state_dict())
        save_file(state, draft / WEIGHTS, metadata={"format": "pt"})
        index = {"metadata": {"total_size": 0}, "weight_map": dict.fromkeys(state, LOADER)}
        (draft / INDEX).write_text(json.dumps(index, indent=2))


@torch.inference_mode(False)
def load_low_rank(
    path: str | Path, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
) -> Any:
    """The model that :func:`save_low_rank` wrote, in evaluation mode and the dtype it was saved in.

    Folders that a converted model's own ``save_pretrained`` wrote are read too, checkpoints of a ``Trainer`` among
    them. (``from_pretrained`` fails on those: their attention holds a weight that fits no original.)

    Args:
        path: the folder.
        dtype: to convert the weights to, rotary frequencies aside; by default they stay as they were saved.
        device: where to put it; torch's default device by default.

    Raises:
        ValueError: no such model there, or weights that do not fit its configuration.
    """
    import transformers
    from safetensors.torch import load_file

    folder = Path(path)
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"dtype must be a floating-point torch.dtype, got {dtype!r}")
    files = _weight_files(folder)
    config = transformers.AutoConfig.from_pretrained(folder)
    entry = getattr(config, CONFIG_ENTRY, None)
    if not isinstance(entry, dict) or entry.get("version") != 1:
        raise ValueError(
            "path must be a folder written by save_low_rank, or by save_pretrained of a converted model: its "
            f"config.json must have an entry {CONFIG_ENTRY} of version 1, got {entry!r}"
        )
    state = {name: value for file in files for name, value in load_file(file).items()}
    model = build_converted(config, entry["layers"], state)
    if (folder / "generation_config.json").exists():
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    return model.to(device=device or torch.get_default_device(), dtype=dtype).eval()


def _weight_files(folder: Path) -> list[Path]:
    """The files that hold the weights: of :func:`save_low_rank`, or of ``save_pretrained``, in shards or not."""
    index = folder / INDEX
    found = []
    if (folder / "model.safetensors").exists():
        found = [folder / "model.safetensors"]
    elif index.exists():
        found = [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()) - {LOADER})]
    if (folder / WEIGHTS).exists():
        found.append(folder / WEIGHTS)
        if len(found) > 1:
            raise ValueError(
                f"path must hold one model, got {folder} with both {WEIGHTS} and {found[0].name}: delete the older one"
            )
    if not found:
        raise ValueError(
            f"path must be a folder written by save_low_rank, or by save_pretrained of a converted model, got {folder} "
            f"without {WEIGHTS} or model.safetensors"
        )
    return found


def build_converted(config: Any, layers: dict[str, dict[str, Any]], state: dict[str, Tensor]) -> Any:
    """A model of ``config`` with the attention in ``layers`` converted, holding the tensors of ``state``."""
    import transformers

    architecture = (config.architectures or [None])[0]
    model_class = getattr(transformers, str(architecture), None)
    if model_class is None:
        raise ValueError(f"config.json must name an architecture of transformers, got {architecture!r}")
    with torch.device("meta"):
        model: Any = model_class(config)
    for name, arguments in layers.items():
        parent_name, _, child = name.rpartition(".")
        parent, frequencies = model.get_submodule(parent_name), state.get(f"{name}.inv_freq")
        if frequencies is None:
            raise ValueError(f"weights must hold {name}.inv_freq, which they lack")
        index = int(parent_name.rpartition(".")[2])
        attention = ConvertedAttention(**arguments, inv_freq=frequencies, layer_idx=index, device="meta")
        setattr(parent, child, attention)
    missing, unexpected = model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()
    decoder_of(model).rotary_emb = fresh_rotary(decoder_of(model))
    empty = [key for key, value in [*model.named_parameters(), *model.named_buffers()] if value.is_meta]
    if empty or unexpected:
        raise ValueError(f"weights must fit the configuration, got missing {empty or missing}, unknown {unexpected}")
    return model


def untied(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """``state`` with each storage once (tied embeddings), contiguous, on the CPU."""
    seen: set[tuple[Any, ...]] = set()
    kept: dict[str, Tensor] = {}
    for name, value in state.items():
        key = (value.data_ptr(), value.shape, value.stride(), value.dtype)
        if key in seen and value.numel():
            continue
        seen.add(key)
        kept[name] = value.detach().cpu().contiguous()
    return kept


# What belongs to a model in a folder: it goes with the model that is replaced. Anything else there is kept.
_OF_A_MODEL = ("config.json", "generation_config.json", WEIGHTS, "model*.safetensors*", "pytorch_model*.bin*")


@contextmanager
def replaced_folder(path: Path) -> Iterator[Path]:
    """A folder to write to, which takes the place of ``path`` when the context ends well and vanishes otherwise.

    Files of another kind than a model's are taken over from what was there.
    """
    path = path.resolve()  # a link stays, and what it points to is replaced
    if path.exists() and not path.is_dir():
        raise ValueError(f"path must be a folder or new, got the file {path}")
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    old = draft.with_name(draft.name + "-old")
    try:
        yield draft
        draft.chmod(0o755)
        if path.exists():
            _take_over(path, draft)
            os.replace(path, old)
        try:
            os.replace(draft, path)
        except BaseException:
            if old.exists():
                os.replace(old, path)
            raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def _take_over(old: Path, new: Path) -> None:
    """Copy what is in the folder ``old`` and belongs to no model, unless ``new`` has it."""
    for entry in old.iterdir():
        target = new / entry.name
        if target.exists() or any(fnmatch(entry.name, pattern) for pattern in _OF_A_MODEL):
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.copytree(entry, target, symlinks=True)
        else:
            shutil.copy2(entry, target, follow_symlinks=False)


def _converted_config(model: nn.Module) -> Any:
    """The model's configuration, its entry brought up to what the attention modules are now."""
    config: Any = getattr(model, "config", None)
    layers = {
        name: module.arguments() for name, module in model.named_modules() if isinstance(module, ConvertedAttention)
    }
    kind = type(model).__name__
    if config is None or not layers:
        raise ValueError(f"model must be converted by to_low_rank_, got {kind} without such attention")
    import transformers

    if getattr(transformers, kind, None) is not type(model):
        raise ValueError(
            f"model must be of a class of transformers, which load_low_rank makes again, got {kind}: pass the model "
            "that it wraps (of torch.compile, for instance)"
        )
    empty = [name for name, value in model.state_dict().items() if value.is_meta]
    if empty:
        raise ValueError(f"model must hold its weights, got {empty[0]} on the meta device")
    setattr(config, CONFIG_ENTRY, {"version": 1, "layers": layers})
    config.architectures = [type(model).__name__]
    return config
