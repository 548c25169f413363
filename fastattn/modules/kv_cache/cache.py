"""A key/value cache of fixed size whose tokens a policy chooses."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from fastattn.modules.kv_cache.call import LayerCall, NewTokens
from fastattn.modules.kv_cache.module import CacheModule
from fastattn.modules.kv_cache.spec import CacheSpec
from fastattn.modules.kv_cache.storage import load_cache, save_cache
from fastattn.modules.kv_cache.update import update_layer
from fastattn.modules.kv_cache.validation import check_layer, check_new_tokens, check_source, row_index
from fastattn.modules.policies import Policy, resolve_policy
from fastattn.modules.rotary import Rotary
from fastattn.validation import check_count


class CompressedKVCache(CacheModule):
    """Keys and values of every layer, kept to ``budget`` tokens per row and head by a policy.

    A model calls :meth:`attend` once per layer, in layer order, in place of its attention: the new tokens attend to the
    cache and to each other, are appended, and the layer is compressed where that is due. A call with at most
    ``max_step`` tokens compresses the rows and heads that have ``budget + interval`` of them; a call with more (a
    prompt, a chunk, a turn) ends by compressing every row and head above ``budget``. Within the budget nothing is
    evicted and the result is a full cache's.

    State, all of it buffers: ``keys``, ``values``, ``positions`` and ``lengths`` per layer, of
    ``C = budget + interval + max_step - 1`` slots; ``columns`` (tokens fed, padding included) and ``tokens_seen``
    (real tokens per row) for all. Counters are up to date once the last layer of a call has run.

    Args:
        policy: a :class:`Policy` or the name of one: ``"expected_attention"``, ``"knorm"``, ``"streaming_llm"``,
            ``"key_diff"``.
        budget: tokens kept per row and head: one number for all layers, or one for each.
        num_layers: layers that attend through this cache.
        num_kv_heads: key/value heads per layer.
        head_dim: dims of a key.
        v_head_dim: dims of a value; ``head_dim`` by default.
        latent_rank: the cache holds latents ``[latent | rope key]`` of ``head_dim`` columns, whose first
            ``latent_rank`` are the value, stored once. Needs ``num_kv_heads=1``.
        num_heads: query heads, for policies with a query window; otherwise that is allocated on the first eager call.
        batch_size: rows.
        interval: decode steps between two compressions.
        max_step: most tokens of a call that counts as a decode step.
        rotary: the model's rotation; policies that look ahead need it.
        dtype: of keys and values; torch's default dtype by default.
        device: of all buffers.

    Raises:
        TypeError, ValueError: an argument of another type or range, an unknown policy, a budget that the policy cannot
            work with.
    """

    def __init__(
        self,
        policy: Policy | str,
        budget: int | Sequence[int],
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        v_head_dim: int | None = None,
        latent_rank: int | None = None,
        num_heads: int | None = None,
        batch_size: int = 1,
        interval: int = 128,
        max_step: int = 1,
        rotary: Rotary | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        spec = CacheSpec(
            resolve_policy(policy),
            budget,
            num_layers=num_layers,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            v_head_dim=v_head_dim,
            latent_rank=latent_rank,
            num_heads=num_heads,
            batch_size=batch_size,
            interval=interval,
            max_step=max_step,
            dtype=dtype,
            rotary=rotary,
        )
        super().__init__(spec, rotary, device)

    # -- what a model calls ------------------------------------------------------------------------------------------

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor | None = None,
        *,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        scale: float | None = None,
    ) -> Tensor:
        """Attend to the cache and the new tokens, append them, compress where due.

        The result is :func:`fastattn.ops.attention`'s over what the cache holds and, causally, the new tokens: the two
        parts are merged by their log-sum-exps. It passes no gradient on; call it under ``torch.no_grad()``.

        Args:
            layer: index of the layer; the layers of a call come in order.
            query: ``[B, H, T, Dk]``, rotated as attention takes it (absorbed, for a latent cache). Query, key and value
                have the cache's dtype.
            key: ``[B, Hkv, T, Dk]``, rotated.
            value: ``[B, Hkv, T, Dv]``; None for a latent cache.
            position_ids: integers ``[B, T]`` (or ``[1, T]``), rising over a row's real tokens, on from those in the
                cache; by default each row's real tokens are counted.
            attention_mask: bool ``[B, T]``, False for padding; a row's real tokens are contiguous.
            scale: softmax scale, ``Dk ** -0.5`` by default; a latent cache must be given its own.

        Returns:
            ``[B, H, T, Dv]``, of the cache's dtype. What it holds at padding is unspecified but finite.

        Raises:
            TypeError, ValueError: arguments that do not fit or require a gradient, before anything is written.
            RuntimeError: an earlier call failed half-way; :meth:`reset` makes the cache usable again.
        """
        new = NewTokens(layer, query, key, value, position_ids, attention_mask, scale, attend=True)
        out = self._take_in(new)
        assert out is not None
        return out

    def update(
        self,
        layer: int,
        query: Tensor | None,
        key: Tensor,
        value: Tensor | None = None,
        *,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        scale: float | None = None,
    ) -> None:
        """Append and compress as :meth:`attend` does, for a module that computes the attention itself.

        Arguments and errors are :meth:`attend`'s; ``query`` may be None where :attr:`needs_queries` is False.
        """
        self._take_in(NewTokens(layer, query, key, value, position_ids, attention_mask, scale, attend=False))

    def _take_in(self, new: NewTokens) -> Tensor | None:
        check_layer(self._spec, new.layer)
        state = self._call_state(new.layer)
        check_new_tokens(state, new)
        compiling = torch.compiler.is_compiling()
        if new.query is not None and self.needs_queries and state.layer.queries is None:
            if compiling:
                raise ValueError(
                    "num_heads must be given to CompressedKVCache when its first call is compiled, got None"
                )
            self._allocate_queries(new.query.shape[1])
        with torch.no_grad():
            call = LayerCall(state, new)
            if compiling:
                return update_layer(call)
            with self._progress.guard(new.layer, self.num_layers, state.remember):
                return update_layer(call)

    # -- what changes the whole cache --------------------------------------------------------------------------------

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

    def insert(self, rows: Tensor, source: CompressedKVCache, source_rows: Tensor | None = None) -> None:
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
        if not isinstance(source, CompressedKVCache):
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
            self._allocate_queries(source._layer(0).queries.shape[1])  # type: ignore[union-attr]
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

    def select(self, index: Tensor) -> CompressedKVCache:
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
            chosen = CompressedKVCache(**arguments, rotary=self.rotary, device=self.device)
            for (buffer, new), (_, old) in zip(chosen._declared_buffers(), self._declared_buffers(), strict=True):
                new.copy_(old.index_select(0, index) if buffer.per_row else old)
        return chosen

    def crop(self, tokens: int) -> None:
        """Take back the newest ``tokens`` real tokens of every row, and as many columns, in place.

        Args:
            tokens: how many, at least 0.

        Raises:
            TypeError: not an integer.
            ValueError: a row has fewer, a compression of any row came later, or those columns were padding for some
                row; then nothing changes.
            RuntimeError: the last call stopped half-way.
        """
        check_count("tokens", tokens, 0)
        self._progress.require_complete()
        if tokens == 0:
            return
        if int(self._croppable) < tokens:
            raise ValueError(
                f"tokens must be at most {int(self._croppable)}, the newest columns that hold a real token of every "
                f"row and have seen no compression since, got {tokens}"
            )
        with torch.no_grad():
            for layer in self._all_layers():
                layer.lengths.sub_(tokens)
                layer.forget_beyond_lengths_()
            for counter in (self.tokens_seen, self.columns, self._croppable):
                counter.sub_(tokens)
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
        self._progress.require_complete()
        arguments = self._spec.arguments(dtype=str(self.dtype).removeprefix("torch."))
        save_cache(Path(path), arguments, self.rotary, self._named_buffers(), fingerprint)

    @classmethod
    def load(
        cls,
        path: str | Path,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        batch_size: int | None = None,
        *,
        policy: Policy | None = None,
        fingerprint: str | None = None,
    ) -> CompressedKVCache:
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
        saved = load_cache(Path(path), fingerprint)
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
