"""The compressed key/value cache.

:mod:`cache` is the public class over :mod:`module`, which holds the state. :mod:`spec` says what a cache is made for,
:mod:`buffers` declares what it holds, :mod:`state`, :mod:`query_ring` and :mod:`progress` are that state. A call goes
through :mod:`validation` and :mod:`update`, which attends (:mod:`attention`) and asks the policy (:mod:`scoring`).
"""

from fastattn.modules.kv_cache.cache import CompressedKVCache

__all__ = ["CompressedKVCache"]
