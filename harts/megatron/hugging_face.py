"""Hugging Face model directories for Megatron: read lazily, written shard by shard, on any layout.

The library's own conversions tell names on disk from names in its models (an expert's matrices,
say, are separate files' entries there and one tensor here), so that what is read and written is
what ``from_pretrained`` and ``save_pretrained`` understand.
"""

from __future__ import annotations

import copy
import json
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from harts.errors import InputError
from harts.megatron.holdings import Holdings, skeleton

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_KEPT = 3
"""Tensors that reading keeps: a layer's pieces ask for the same few in turns."""


class DirectoryWeights(Mapping[str, Tensor]):
    """The tensors of a model directory by the names of the library's model, read when asked for."""

    def __init__(self, directory: Path, source: Any) -> None:
        """Look names up; no tensor is read yet.

        Args:
            directory: holds ``model.safetensors``, or parts of it and their index.
            source: the Hugging Face configuration of the model.

        Raises:
            InputError: no weights there, or files that cannot be read.
        """
        self._files = _files(directory)
        self._model = skeleton(source)
        conversions = get_model_conversion_mapping(self._model)
        renamings = [c for c in conversions if isinstance(c, WeightRenaming)]
        converters = [c for c in conversions if isinstance(c, WeightConverter)]
        self._converters = {p: c for c in converters for p in c.source_patterns}
        self._parts: dict[str, list[tuple[str | None, str]]] = {}
        for key in sorted(self._files, key=dot_natural_key):
            name, pattern = rename_source_key(key, renamings, converters)
            self._parts.setdefault(name, []).append((pattern, key))
        self._kept: OrderedDict[str, Tensor] = OrderedDict()

    def __getitem__(self, name: str) -> Tensor:
        parts = self._parts[name]
        if name not in self._kept:
            self._kept[name] = self._read(name, parts)
            if len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(name)
        return self._kept[name]

    def __contains__(self, name: object) -> bool:
        return name in self._parts

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def _read(self, name: str, parts: Sequence[tuple[str | None, str]]) -> Tensor:
        pattern, key = parts[0]
        if pattern is None:
            return self._tensor(key)
        converter = copy.deepcopy(self._converters[pattern])
        for of_part, key in parts:
            converter.add_tensor(name, key, of_part, self._tensor(key))
        made = converter.convert(name, model=self._model, config=self._model.config)[name]
        whole: Tensor = made[0] if isinstance(made, list) else made
        return whole

    def _tensor(self, key: str) -> Tensor:
        try:
            with safe_open(self._files[key], framework="pt") as file:
                tensor: Tensor = file.get_tensor(key)
        except (OSError, SafetensorError) as error:
            raise InputError(f"cannot read {key!r} from {self._files[key]}: {error}") from error
        return tensor


def save_hugging_face(
    chunks: Sequence[nn.Module],
    source: Any,
    directory: Path,
    *,
    max_shard_size: int | str = "5GB",
) -> None:
    """Write a directory that ``from_pretrained`` loads; every rank calls this alike.

    Parts travel to the first rank one tensor at a time, and it writes a file as soon as it has all
    of it: no rank ever holds more than a file and a tensor of the whole model.

    Args:
        chunks: of ``build_model``, wrapped or not.
        source: the Hugging Face configuration.
        directory: made if need be; the first rank alone writes there.
        max_shard_size: of one file, in bytes or such as "5GB".

    Raises:
        InputError: the ranks together do not hold the whole model.
    """
    # Parts of tensors travel over the CPU, whatever the training itself uses.
    group = dist.new_group(backend="gloo")
    try:
        holdings = Holdings.of(chunks, source, group)
        first = dist.get_rank() == 0
        writer = _Writer(holdings, source, directory, max_shard_size) if first else None
        for name in holdings.shapes:
            whole = _gather(holdings, name, group)
            if writer is not None and whole is not None:
                writer.add(name, whole)
        if writer is not None:
            writer.finish()
        dist.barrier(group=group)
    finally:
        dist.destroy_process_group(group)


def _gather(holdings: Holdings, name: str, group: Any) -> Tensor | None:
    """The whole tensor on the CPU of the first rank; None on the others."""
    rank = dist.get_rank()
    own = {part.region: part.tensor for part in holdings.own if part.piece.name == name}
    whole = None
    if rank == 0:
        whole = torch.empty(holdings.shapes[name], dtype=holdings.dtypes[name])
    for region, holder in holdings.holders[name].items():
        part = own[region].cpu().contiguous() if rank == holder else None
        if part is not None and rank != 0:
            dist.send(part, 0, group=group)
        if whole is not None:
            if part is None:
                part = torch.empty(region.shape, dtype=whole.dtype)
                dist.recv(part, holder, group=group)
            region.view(whole).copy_(part)
    return whole


class _Writer:
    """Writes each file once its last tensor has come."""

    def __init__(
        self, holdings: Holdings, source: Any, directory: Path, max_shard_size: int | str
    ) -> None:
        self._model = skeleton(source)
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        sizes = self._on_disk(
            {
                n: torch.empty(s, dtype=holdings.dtypes[n], device="meta")
                for n, s in holdings.shapes.items()
            }
        )
        self._split = split_torch_state_dict_into_shards(
            sizes, filename_pattern="model{suffix}.safetensors", max_shard_size=max_shard_size
        )
        self._waiting: dict[str, dict[str, Tensor]] = {}
        dtype = next(iter(holdings.dtypes.values()))
        self._write_config(source, dtype)

    def add(self, name: str, whole: Tensor) -> None:
        for key, tensor in self._on_disk({name: whole}).items():
            file = self._split.tensor_to_filename[key]
            arrived = self._waiting.setdefault(file, {})
            arrived[key] = tensor.contiguous()
            if len(arrived) == len(self._split.filename_to_tensors[file]):
                save_file(arrived, self._directory / file, metadata={"format": "pt"})
                del self._waiting[file]

    def finish(self) -> None:
        assert not self._waiting
        if self._split.is_sharded:
            index = {
                "metadata": self._split.metadata,
                "weight_map": self._split.tensor_to_filename,
            }
            (self._directory / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")

    def _on_disk(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        converted: dict[str, Tensor] = revert_weight_conversion(self._model, tensors)
        return converted

    def _write_config(self, source: Any, dtype: torch.dtype) -> None:
        config = copy.deepcopy(source)
        config.architectures = [type(self._model).__name__]
        config.dtype = dtype
        config.save_pretrained(self._directory)


def _files(directory: Path) -> dict[str, Path]:
    """The file of every tensor on disk."""
    index = directory / INDEX
    try:
        if index.is_file():
            named: dict[str, str] = json.loads(index.read_text())["weight_map"]
            return {key: directory / file for key, file in named.items()}
        with safe_open(directory / WEIGHTS, framework="pt") as file:
            return dict.fromkeys(file.keys(), directory / WEIGHTS)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise InputError(
            f"expected {WEIGHTS}, or {INDEX} and its parts, in {directory}: {error}"
        ) from error
