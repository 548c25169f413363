"""A key/value cache of fixed size whose tokens a policy chooses."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from fastattn.modules.kv_cache.call import LayerCall, NewTokens
from fastattn.modules.kv_cache.module import CacheModule
from fastattn.modules.kv_cache.spec import CacheSpec
from fastattn.modules.kv_cache.update import update_layer
from fastattn.modules.kv_cache.validation import check_layer, check_new_tokens, row_index
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
            ``"key_diff"``, ``"snap_kv"``, ``"tova"``, ``"h2o"``, ``"random"``.
        budget: tokens kept per row and head.
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
        budget: int,
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
        if new.query is not None and self._spec.ring_size and state.layer.queries is None:
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

    def reset(self) -> None:
        """Forget everything, in place; also makes a cache usable again after a call that failed half-way."""
        with torch.no_grad():
            for buffer, tensor in self._declared_buffers():
                if buffer.empty is not None:
                    tensor.fill_(buffer.empty)
        self._progress.restart()

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
