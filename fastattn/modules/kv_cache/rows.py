"""What changes a cache as a whole: rows are emptied, moved, inserted, taken back, written to a file and read again."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from fastattn.modules.kv_cache.module import CacheModule
from fastattn.modules.kv_cache.storage import SavedCache, load_cache, save_cache
from fastattn.modules.kv_cache.validation import check_croppable_rows, check_source, row_counts, row_index
from fastattn.modules.policies import Policy
from fastattn.validation import check_count

Cache = TypeVar("Cache", bound="RowCache")


class RowCache(CacheModule):
    """The rows of :class:`CompressedKVCache`."""

    def reset(self, rows: Tensor | None = None) -> None:
        """Forget everything, in place; also makes a cache usable again after a call that failed half-way.

        Args:
            rows: integers ``[N]``: forget these rows only, as though nothing had ever been fed to them. The columns
                that were fed stay counted. Nothing waits for a device, so it may stand between two compiled steps.

        Raises:
            TypeError, ValueError: ``rows`` is not that.
            RuntimeError: rows were given, and the last call stopped half-way.
        """
        if rows is not None:
            self._progress.require_complete()
            rows = row_index(rows, self.batch_size, self.device, "rows")
        with torch.no_grad():
            for buffer, tensor in self._declared_buffers():
                if buffer.empty is None:
                    continue
                if rows is None:
                    tensor.fill_(buffer.empty)
                elif buffer.per_row:
                    tensor.index_fill_(0, rows, buffer.empty)
            self._croppable.zero_()  # rows of different ages have no newest columns in common
        if rows is None:
            self._progress.restart()

    def insert(self, rows: Tensor, source: RowCache, source_rows: Tensor | None = None) -> None:
        """Rows of another cache take the place of ``rows``, in place: a request joins a batch that is decoding.

        The other rows stay as they are. Nothing waits for a device, so that it may stand between two compiled steps.
        ``columns`` becomes the larger of both caches', so that no row has seen more tokens than columns were fed.

        Args:
            rows: integers ``[N]``, each once: what is replaced.
            source: a cache of the same layers, capacities and dtype, on any device.
            source_rows: integers ``[N]``: what replaces them; by default all rows of ``source`` in order.

        Raises:
            TypeError, ValueError: not that, or a cache of other sizes; nothing has changed then.
            RuntimeError: the last call of one of the caches stopped half-way.
        """
        if not isinstance(source, RowCache):
            raise TypeError(f"source must be a CompressedKVCache, got {type(source).__name__}")
        if source is self:
            raise ValueError("source must be another cache: reorder() moves rows inside one")
        self._progress.require_complete()
        source._progress.require_complete()
        check_source(self._spec, source._spec, (self.dtype, source.dtype))
        rows = row_index(rows, self.batch_size, self.device, "rows", distinct=True)
        if source_rows is None:
            source_rows = torch.arange(source.batch_size, device=source.device)
        source_rows = row_index(source_rows, source.batch_size, source.device, "source_rows")
        if rows.shape != source_rows.shape:
            raise ValueError(
                f"rows must name as many rows as come from source, {source_rows.shape[0]}, got {rows.shape[0]}"
            )
        if source._holds_queries and not self._holds_queries:
            self._allocate_queries(source._layers_with_queries()[0].queries.shape[1])  # type: ignore[union-attr]
        with torch.no_grad():
            given = source._named_buffers()
            for name, (buffer, tensor) in self._named_buffers().items():
                if not buffer.per_row:
                    continue
                if name in given:
                    new = given[name][1].index_select(0, source_rows).to(tensor.device)
                    tensor.index_copy_(0, rows, new)
                else:  # queries of a source that was never fed
                    tensor.index_fill_(0, rows, 0)
            self.columns.copy_(torch.maximum(self.columns, source.columns.to(self.device)))
            self._croppable.zero_()

    def reorder(self, index: Tensor) -> None:
        """Row ``i`` becomes what row ``index[i]`` was (beam search), in place.

        Args:
            index: integers ``[B]``, each a row.

        Raises:
            TypeError, ValueError: not that.
            RuntimeError: the last call stopped half-way.
        """
        self._progress.require_complete()
        index = row_index(index, self.batch_size, self.device)
        if index.shape[0] != self.batch_size:
            raise ValueError(f"index must have shape [{self.batch_size}], got {list(index.shape)}")
        with torch.no_grad():
            for buffer, tensor in self._declared_buffers():
                if buffer.per_row:
                    tensor.copy_(tensor.index_select(0, index))

    def select(self: Cache, index: Tensor) -> Cache:
        """A new cache of the rows ``index``, in that order, repeated as often as named.

        Args:
            index: integers ``[N]``, each a row, at least one.

        Raises:
            TypeError, ValueError: not that.
            RuntimeError: the last call stopped half-way.
        """
        self._progress.require_complete()
        index = row_index(index, self.batch_size, self.device)
        if index.shape[0] == 0:
            raise ValueError("index must name at least one row, got none")
        with torch.inference_mode(False), torch.no_grad():
            arguments = self._spec.arguments(
                policy=copy.deepcopy(self.policy), batch_size=index.shape[0], dtype=self.dtype
            )
            chosen = type(self)(
                **arguments, rotary=self._given_rotary(), device=self.device, persistent=self.persistent
            )
            for (buffer, new), (_, old) in zip(chosen._declared_buffers(), self._declared_buffers(), strict=True):
                new.copy_(old.index_select(0, index) if buffer.per_row else old)
        return chosen

    def crop(self, tokens: int | Tensor) -> None:
        """Take back the newest ``tokens`` real tokens of every row, and as many columns, in place.

        What the last call of at most ``max_step`` tokens appended can always be taken back.

        Args:
            tokens: how many, at least 0; or integers ``[B]``, so many of each row. A column then counts as taken back
                where every row takes it back: ``columns`` falls by the smallest of them.

        Raises:
            TypeError: not integers.
            ValueError: a row has fewer, a compression came later than they (of any row for an integer, of the row for a
                tensor) or, for an integer, those columns were padding for some row; then nothing changes.
            RuntimeError: the last call stopped half-way.
        """
        if isinstance(tokens, Tensor):
            counts = row_counts(tokens, self.batch_size, self.device)
        else:
            check_count("tokens", tokens, 0)
            counts = torch.full_like(self._croppable_rows, tokens)
        self._progress.require_complete()
        if isinstance(tokens, Tensor):
            check_croppable_rows(counts, self._croppable_rows)
        elif int(self._croppable) < tokens:
            raise ValueError(
                f"tokens must be at most {int(self._croppable)}, the newest columns that hold a real token of every "
                f"row and have seen no compression since, got {tokens}: calls of at most max_step = {self.max_step} "
                f"tokens can be taken back, and more while no row exceeds budget = {self.budget}"
            )
        with torch.no_grad():
            for layer in self._all_layers():
                layer.lengths.sub_(counts[:, None])
                layer.forget_beyond_lengths_()
            smallest, largest = counts.amin(), counts.amax()
            self._croppable.copy_(torch.where(smallest == largest, (self._croppable - smallest).clamp(min=0), 0))
            self._croppable_rows.sub_(counts)
            self.tokens_seen.sub_(counts)
            self.columns.sub_(smallest)
            self._ring().forget_from_(self.tokens_seen)

    # -- stored prefixes ---------------------------------------------------------------------------------------------

    def save(self, path: str | Path, fingerprint: str = "") -> None:
        """Write the cache to one safetensors file: every buffer cut to what is filled, and what it was made for.

        The file is written under a temporary name and renamed: at ``path`` stands the old file or the whole new one.

        Args:
            path: of the file.
            fingerprint: says what computed the keys (a model, its weights); :meth:`load` compares it.

        Raises:
            ImportError: the package safetensors is missing.
            RuntimeError: the last call stopped half-way.
        """
        self._write(Path(path), fingerprint, {})

    def _write(self, path: Path, fingerprint: str, extras: dict[str, Tensor]) -> None:
        """:meth:`save`, with further tensors beside the buffers."""
        self._progress.require_complete()
        arguments = self._spec.arguments(dtype=str(self.dtype).removeprefix("torch."))
        save_cache(path, arguments, self._given_rotary(), self._named_buffers(), fingerprint, extras)

    @classmethod
    def load(
        cls: type[Cache],
        path: str | Path,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        batch_size: int | None = None,
        *,
        policy: Policy | None = None,
        fingerprint: str | None = None,
    ) -> Cache:
        """A cache that goes on exactly as the one that was saved to ``path``.

        Args:
            path: of a file that :meth:`save` wrote.
            device: of the new cache; the CPU by default.
            dtype: of keys and values; the saved one by default.
            batch_size: a cache of one row is repeated as often; by default the rows that were saved.
            policy: in place of the saved one; needed where that is of a class that fastattn does not have.
            fingerprint: what the file must have been saved with; None does not look.

        Raises:
            ImportError: the package safetensors is missing.
            TypeError, ValueError: not such a file, a damaged or altered one, of a newer format, with another
                fingerprint, or of more than one row where ``batch_size`` is given.
        """
        return cls._restored(load_cache(Path(path), fingerprint), device, dtype, batch_size, policy)

    @classmethod
    def _restored(
        cls: type[Cache],
        saved: SavedCache,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
        batch_size: int | None,
        policy: Policy | None,
    ) -> Cache:
        """:meth:`load`, of a file that has been read."""
        arguments = saved.arguments(policy)
        rows = arguments["batch_size"]
        if batch_size is not None:
            check_count("batch_size", batch_size, 1)
            if rows not in (1, batch_size):
                raise ValueError(
                    f"batch_size must be {rows}, or the file hold one row to be repeated, got {batch_size}"
                )
            arguments["batch_size"] = batch_size
        if dtype is not None:
            arguments["dtype"] = dtype
        with torch.inference_mode(False), torch.no_grad():
            cache = cls(**arguments, device=device)
            for name, (buffer, tensor) in cache._named_buffers().items():
                saved.fill_(name, buffer, tensor)
        return cache
