"""A compressed cache for code that makes its own calls: pipelines, evaluation harnesses, scripts."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

from fastattn.integrations.transformers import _versions
from fastattn.integrations.transformers._cache import CompressedCache, compressed_cache
from fastattn.integrations.transformers._layers import ForwardedCache
from fastattn.modules.policies import Policy


@contextlib.contextmanager
def compressed(
    model: Any, policy: Policy | str | None = "key_diff", budget: int | Sequence[int] = 1024, **options: Any
) -> Iterator[None]:
    """Give every ``model.generate`` and every call of ``model`` inside the ``with`` a compressed cache of its own.

    For code that cannot be handed a cache, such as a pipeline or an evaluation harness. A call that brings a
    compressed cache keeps it, so that the steps of one generation share theirs. On leaving, the model is as it was.

    Args:
        model: as :func:`compressed_cache` takes it.
        policy: as :func:`compressed_cache` takes it; None leaves the model its own full cache: the baseline, with no
            other change to a script.
        budget: tokens kept per row and head of every full-attention layer.
        options: of :func:`compressed_cache`: ``interval``, ``max_step``, ``dtype``. A cache sizes itself to the rows
            of its first call.

    Raises:
        TypeError, ValueError: as :func:`compressed_cache`, on entering; ``batch_size`` given; a ``with`` inside
            another one for the same model. From a call inside: a cache that is not compressed, or ``use_cache=False``.
    """
    if "batch_size" in options:
        raise TypeError("batch_size must not be given: each cache takes the rows of its first call")
    if policy is None:
        yield
        return
    supply = _Supply(model, {"policy": policy, "budget": budget, **options})
    if any(isinstance(hook, _Supply) for hook in model._forward_pre_hooks.values()):
        raise ValueError("model must not be inside another compressed(...), got one that is: leave that one first")
    handle = model.register_forward_pre_hook(supply, with_kwargs=True, prepend=True)
    own = vars(model).get("generate")
    if hasattr(model, "generate"):
        model.generate = supply.wrap(model.generate)
    try:
        yield
    finally:
        handle.remove()
        if own is not None:
            model.generate = own
        else:
            vars(model).pop("generate", None)


class _Supply:
    """Forward pre-hook of a model that puts a new compressed cache into calls that bring none."""

    def __init__(self, model: Any, options: dict[str, Any]) -> None:
        self.model, self.options = model, options
        self.argument = _versions.cache_argument(model)
        self.position = _versions.argument_position(model, self.argument)
        self.next: CompressedCache | None = self._new()  # made at once: wrong options are noticed on entering

    def __call__(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if len(args) > self.position:  # by position: it moves to where `supply` looks
            kwargs = {**kwargs, self.argument: args[self.position]}
            after = list(inspect.signature(model.forward).parameters)[self.position + 1 :]
            kwargs.update(zip(after, args[self.position + 1 :], strict=False))
        self.supply(kwargs)
        return args[: self.position], kwargs

    def wrap(self, generate: Any) -> Any:
        """``generate`` with a cache: it would make one of its own before the model is called."""

        def generate_compressed(*args: Any, **kwargs: Any) -> Any:
            self.supply(kwargs)
            return generate(*args, **kwargs)

        return generate_compressed

    def supply(self, kwargs: dict[str, Any]) -> None:
        """Put a cache into ``kwargs`` unless a compressed one is there."""
        if kwargs.get("use_cache") is False:
            raise ValueError("use_cache must not be False inside compressed(...): nothing would be compressed")
        given = [name for name in _versions.CACHE_ARGUMENTS if kwargs.get(name) is not None]
        for name in given:
            self._check(kwargs[name])
        if not given:
            for name in _versions.CACHE_ARGUMENTS:
                kwargs.pop(name, None)
            cache, self.next = self.next or self._new(), None
            kwargs.update({self.argument: cache, "use_cache": True})

    def _new(self) -> CompressedCache:
        return compressed_cache(self.model, **self.options)

    def _check(self, cache: Any) -> None:
        if not isinstance(cache, ForwardedCache):
            raise ValueError(
                f"{self.argument} must come from compressed_cache inside compressed(...), got {type(cache).__name__}"
            )
