"""A key/value cache of fixed size whose tokens a policy chooses."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastattn.modules.kv_cache.call import LayerCall, NewTokens
from fastattn.modules.kv_cache.rows import RowCache
from fastattn.modules.kv_cache.scoring import without_autocast
from fastattn.modules.kv_cache.spec import CacheSpec
from fastattn.modules.kv_cache.state import CallState
from fastattn.modules.kv_cache.update import update_layer
from fastattn.modules.kv_cache.validation import check_new_tokens, is_plain
from fastattn.modules.policies import Policy, resolve_policy
from fastattn.modules.rotary import Rotary
from fastattn.validation import FAKE, has_autocast


class CompressedKVCache(RowCache):
    """Keys and values of every layer, kept to ``budget`` tokens per row and head by a policy.

    A model calls :meth:`attend` once per layer, in layer order, in place of its attention: the new tokens attend to the
    cache and to each other, are appended, and the layer is compressed where that is due. A call with at most
    ``max_step`` tokens begins by compressing the rows and heads that have ``budget + interval`` of them, chosen by what
    was there before the call, so that what it appends can always be taken back; a call with more (a prompt, a chunk, a
    turn) ends by compressing every row and head above ``budget``. Within the budget nothing is evicted and the result
    is a full cache's.

    State, all of it buffers: ``keys``, ``values``, ``positions`` and ``lengths`` per layer, of
    ``C = budget + interval + max_step - 1`` slots; ``columns`` (tokens fed, padding included) and ``tokens_seen``
    (real tokens per row) for all. Counters are up to date once the last layer of a call has run.

    Args:
        policy: a :class:`Policy` or the name of one: ``"expected_attention"``, ``"knorm"``, ``"streaming_llm"``,
            ``"key_diff"``, ``"snap_kv"``, ``"tova"``, ``"h2o"``, ``"random"``.
        budget: tokens kept per row and head: one number for all layers, or one for each.
        num_layers: layers that attend through this cache.
        num_kv_heads: key/value heads per layer.
        head_dim: dims of a key: one number for all layers, or one for each.
        v_head_dim: dims of a value, likewise; ``head_dim`` by default.
        latent_rank: the cache holds latents ``[latent | rope key]`` of ``head_dim`` columns, whose first
            ``latent_rank`` (one number for all layers, or one for each) are the value, stored once. Needs
            ``num_kv_heads=1``.
        num_heads: query heads, for policies with a query window; otherwise that is allocated on the first eager call.
        batch_size: rows.
        interval: decode steps between two compressions.
        max_step: most tokens of a call that counts as a decode step.
        rotary: the model's rotation; policies that look ahead need it. A list gives every layer its own; None in it
            is a layer that does not rotate, which such policies take for the identity.
        window: positions that a query sees, its own included: one number for all layers, or one for each, None where a
            query sees all. A layer with a window holds its newest ``window`` tokens in place of a budget, and no
            policy scores it; distances go by position.
        dtype: of keys and values; torch's default dtype by default.
        storage: ``"int8"``, ``"fp8"`` or ``"int4"``: keys and values are quantised as they are appended
            (:func:`fastattn.ops.quantize`), and attention reads the codes. On a CPU only. NaN and inf in a new token
            raise in eager mode and poison what sees the token in a compiled graph.
        device: of all buffers.
        persistent: where the cache is a part of a model, the model's ``state_dict`` holds it. False leaves it out, and
            loading the model leaves the cache as it is; :meth:`state_dict` of the cache itself is not affected.

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
        head_dim: int | Sequence[int],
        v_head_dim: int | Sequence[int] | None = None,
        latent_rank: int | Sequence[int] | None = None,
        num_heads: int | None = None,
        batch_size: int = 1,
        interval: int = 128,
        max_step: int = 1,
        rotary: Rotary | Sequence[Rotary | None] | None = None,
        window: int | Sequence[int | None] | None = None,
        dtype: torch.dtype | None = None,
        storage: str | None = None,
        device: torch.device | str | None = None,
        persistent: bool = True,
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
            storage=storage,
            window=window,
            rotary=rotary,
        )
        super().__init__(spec, rotary, device, persistent)

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
        sinks: Tensor | None = None,
        softcap: float | None = None,
        alibi_slopes: Tensor | None = None,
    ) -> Tensor:
        """Attend to the cache and the new tokens, append them, compress where due.

        The result is :func:`fastattn.ops.attention`'s over what the cache holds and, causally, the new tokens: the two
        parts are merged by their log-sum-exps. It passes no gradient on; call it under ``torch.no_grad()``.

        Args:
            layer: index of the layer; the layers of a call come in order.
            query: ``[B, H, T, Dk]``, rotated as attention takes it (absorbed, for a latent cache). Query, key and value
                have the cache's dtype; under autocast any float dtype, and are cast to it.
            key: ``[B, Hkv, T, Dk]``, rotated.
            value: ``[B, Hkv, T, Dv]``; None for a latent cache.
            position_ids: integers ``[B, T]`` (or ``[1, T]``), rising over a row's real tokens, on from those in the
                cache; by default each row's real tokens are counted.
            attention_mask: bool or integer ``[B, T]``, False or 0 for padding, anywhere in a row.
            scale: softmax scale, ``Dk ** -0.5`` by default; a latent cache must be given its own.
            sinks: ``[H]``, any float dtype: a logit per head without a value.
            softcap: ``c > 0``, scores become ``c tanh(score / c)``.
            alibi_slopes: ``[H]``, any float dtype: what a position of distance takes from a score; not for latents.
                Policies that look at attention themselves look at plain scores, without these three.

        Returns:
            ``[B, H, T, Dv]``, of the cache's dtype. What it holds at padding is unspecified but finite.

        Raises:
            TypeError, ValueError: arguments that do not fit or require a gradient, before anything is written.
            RuntimeError: an earlier call failed half-way; :meth:`reset` makes the cache usable again.
        """
        new = NewTokens(layer, query, key, value, position_ids, attention_mask, scale, True)
        if sinks is not None or softcap is not None or alibi_slopes is not None:
            given = {"sinks": sinks, "softcap": softcap, "alibi_slopes": alibi_slopes}
            new.features = {name: feature for name, feature in given.items() if feature is not None}
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
        state = self._call_state(new.layer)
        keys = state.layer._buffers["keys"]
        assert keys is not None
        new.convert_(keys.dtype if state.layer.spec.storage is None else self.dtype)
        compiling = torch.compiler.is_compiling()
        # as hides_values() says, a Python call less
        traced = compiling or keys.is_meta or torch._C._get_dispatch_mode(FAKE) is not None
        if traced or not is_plain(state, new):
            check_new_tokens(state, new)
        held = state.layer
        if self._spec.policy.query_window and new.query is not None and held.queries is None and not held.spec.window:
            if compiling:
                raise ValueError(
                    "num_heads must be given to CompressedKVCache when its first call is compiled, got None"
                )
            self._allocate_queries(new.query.shape[1])
        # What comes has been cast to the cache's dtype: autocast has nothing left to say about it. Neither context is
        # entered where it changes nothing: they cost as much as an operator.
        if torch.is_grad_enabled() or (
            has_autocast(new.key.device.type) and torch.is_autocast_enabled(new.key.device.type)
        ):
            with torch.no_grad(), without_autocast(new.key.device.type):
                return self._update(state, new, traced)
        return self._update(state, new, traced)

    def _update(self, state: CallState, new: NewTokens, traced: bool) -> Tensor | None:
        call = LayerCall(state, new, traced)
        if traced:
            return update_layer(call)
        return self._progress.run(update_layer, call, new.layer, self._spec.num_layers, state.remember)
