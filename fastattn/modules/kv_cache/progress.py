"""What marks a cache half-written: how far the current call has come, and whether a failure can be undone."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import TypeVar

Call = TypeVar("Call")
Result = TypeVar("Result")

_TWO_THREADS = (
    "another thread's call is under way in this cache: a cache serves one call at a time, give every thread a cache of "
    "its own"
)


class Progress:
    """How far a cache's current call has come. Eager mode keeps it; compiled graphs leave it alone.

    Attributes:
        rewritten: this layer's buffers, or the counters, were rewritten: a failure now cannot be undone.
        warned_nan: the user was told that the policy returns NaN.
    """

    def __init__(self) -> None:
        self._next_layer = 0
        self._broken: str | None = None
        self._entered: dict[str, int] = {}  # the thread that updates a layer right now; setdefault is atomic
        self._thread = 0  # the thread of the call that has come to the next layer
        self.rewritten = False
        self.warned_nan = False
        self._owners: dict[int, weakref.ref[object]] = {}

    def __getstate__(self) -> dict[str, object]:
        """Of a copy, which other modules may use."""
        return self.__dict__ | {"_owners": {}}

    def claim(self, layer: int, module: object) -> None:
        """Note that ``module`` uses ``layer``; until the cache is emptied no other may.

        Raises:
            ValueError: another one does.
        """
        owner = self._owners.get(layer)
        held = None if owner is None else owner()
        if held is None:
            self._owners[layer] = weakref.ref(module)
        elif held is not module:
            raise ValueError(
                f"layer must be one that no other module uses, got {layer}, which belongs to another "
                f"{type(held).__name__}: make one cache for all layers, make_cache(num_layers=...), and give each "
                "module its own layer=, in order"
            )

    @property
    def complete(self) -> bool:
        """The last call went through all layers."""
        return self._broken is None and self._next_layer == 0

    def restart(self) -> None:
        """The cache is empty or freshly loaded."""
        self._next_layer, self._broken, self.rewritten = 0, None, False
        self._owners.clear()

    def require_complete(self) -> None:
        """Raise unless the last call went through all layers."""
        if self._broken is not None:
            raise RuntimeError(f"the cache is invalid since {self._broken}: call reset() before using it again")
        if self._next_layer != 0:
            if self._thread != threading.get_ident():
                raise RuntimeError(_TWO_THREADS)
            raise RuntimeError(
                f"the last call stopped before layer {self._next_layer}: finish it, or call reset() before using the "
                "cache again"
            )

    def run(
        self,
        update: Callable[[Call], Result],
        call: Call,
        layer: int,
        num_layers: int,
        remember: Callable[[], Callable[[], None]],
    ) -> Result:
        """One layer's update, ``update(call)``; on a failure undo it, or mark the cache invalid.

        Args:
            update: takes in the new tokens.
            call: its argument.
            layer: index of the layer.
            num_layers: layers of the cache.
            remember: notes what the update is about to append to, and returns what undoes the appending. Called for
                the first layer only: later, other layers have already been updated.
        """
        thread = threading.get_ident()
        if self._entered.setdefault("thread", thread) != thread:
            raise RuntimeError(_TWO_THREADS)
        undo = None
        started = False
        try:
            if layer == 0 or self._broken is not None:
                self.require_complete()
            if layer != self._next_layer:
                raise ValueError(
                    f"layer must be {self._next_layer}: the layers of a call come in order, 0 to {num_layers - 1}, "
                    f"got {layer}"
                )
            undo = remember() if layer == 0 else None
            started = True
            result = update(call)
            self._next_layer, self._thread = (layer + 1) % num_layers, thread
            return result
        except BaseException as error:
            if started and (undo is None or self.rewritten):
                self._broken = f"layer {layer} failed with {type(error).__name__}"
            elif undo is not None:
                undo()
            raise
        finally:
            self.rewritten = False
            self._entered.pop("thread", None)
