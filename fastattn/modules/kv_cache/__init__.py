"""The compressed key/value cache.

:mod:`cache` is the public class over :mod:`module`, which holds the state. :mod:`spec` says what a cache is made for
(:mod:`budgets` differ between layers), :mod:`buffers` declares what it holds, :mod:`storage` writes that to a file;
:mod:`state`, :mod:`query_ring` and :mod:`progress` are that state. A call goes through :mod:`validation` and
:mod:`update`, which attends (:mod:`attention`) and asks the policy (:mod:`scoring`).
"""

from fastattn.modules.kv_cache.budgets import pyramid_budgets
from fastattn.modules.kv_cache.cache import CompressedKVCache

__all__ = ["CompressedKVCache", "pyramid_budgets"]
