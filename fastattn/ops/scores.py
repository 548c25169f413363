"""Token scores of the eviction policies, and the query statistics that Expected Attention needs.

Every score is float32 ``[B, Hkv, C]`` (float64 for float64 keys), higher is kept; slots beyond ``lengths`` get -inf.
Rows and heads with ``lengths < min_length`` are skipped: what they return is unspecified, and on a device their
kernels return at once.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fastattn import validation as check
from fastattn.ops._outputs import accumulator_dtype
from fastattn.ops._register import register
from fastattn.ops.quantize import check_codes, code_columns


def score_knorm(key: Tensor, lengths: Tensor, *, min_length: int = 0, key_scale: Tensor | None = None) -> Tensor:
    r"""Knorm (arXiv 2406.11430): :math:`s_t = -\lVert k_t \rVert_2`.

    Args:
        key: ``[B, Hkv, C, D]`` as cached, float16, bfloat16, float32 or float64.
        lengths: int32 ``[B, Hkv]``, valid slots.
        min_length: rows and heads with fewer valid slots are skipped.
        key_scale: the keys are codes, as in :func:`decode_attention`; on a GPU they are turned into numbers first.

    Returns:
        ``[B, Hkv, C]``, float32 (float64 for float64 keys), -inf beyond ``lengths``; unspecified for skipped rows.

    Raises:
        TypeError, ValueError: an argument of another type or shape, or one that requires a gradient.
    """
    _check_keys("score_knorm", key, lengths, min_length, key_scale)
    return SCORE_KNORM(key, lengths, min_length, key_scale)


def score_key_diff(key: Tensor, lengths: Tensor, *, min_length: int = 0, key_scale: Tensor | None = None) -> Tensor:
    r"""KeyDiff (arXiv 2504.15364): how little a key points where the average key points.

    .. math:: u_t = k_t / \lVert k_t \rVert,\quad a = \mathrm{mean}_t\, u_t,\quad s_t = -\cos(k_t, a)

    over the valid slots of a row and head. A zero key, or a zero anchor, has cosine 0.

    Args:
        key: ``[B, Hkv, C, D]`` as cached.
        lengths: int32 ``[B, Hkv]``, valid slots.
        min_length: rows and heads with fewer valid slots are skipped.
        key_scale: the keys are codes, as in :func:`decode_attention`; on a GPU they are turned into numbers first.

    Returns:
        ``[B, Hkv, C]``, float32 (float64 for float64 keys), -inf beyond ``lengths``; unspecified for skipped rows.

    Raises:
        TypeError, ValueError: an argument of another type or shape, or one that requires a gradient.
    """
    _check_keys("score_key_diff", key, lengths, min_length, key_scale)
    return SCORE_KEY_DIFF(key, lengths, min_length, key_scale)


def score_expected_attention(
    key: Tensor,
    value: Tensor,
    lengths: Tensor,
    positions: Tensor,
    query_mean: Tensor | None = None,
    query_cov: Tensor | None = None,
    query_samples: Tensor | None = None,
    *,
    scale: float,
    n_sink: int = 4,
    epsilon: float = 0.0,
    use_value_norm: bool = True,
    min_length: int = 0,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    value_dim: int | None = None,
) -> Tensor:
    r"""Expected Attention (arXiv 2510.00636): the attention that future queries are expected to pay.

    Moment form, with the future queries' mean and covariance per query head:
    :math:`z_t = c\,\mu\cdot k_t + \tfrac{c^2}{2} k_t^\top \Sigma k_t` (second term only with ``query_cov``).
    Sample form, with ``N`` rotated query samples, :math:`l_{it} = c\, q_i \cdot k_t`:
    :math:`z_t = \mathrm{mean}_i\, l_{it} + \tfrac12 \mathrm{var}_i\, l_{it}` (biased variance): the same numbers.
    Then :math:`a = \mathrm{softmax}_t\, z` over the valid slots with ``positions >= n_sink``, averaged over the query
    heads of each key/value head, and :math:`s_t = (a_t + \epsilon) \lVert v_t \rVert_2`. Slots with
    ``positions < n_sink`` (sinks) get +inf.

    Args:
        key: ``[B, Hkv, C, D]`` as cached (rotated).
        value: ``[B, Hkv, C, Dv]``.
        lengths: int32 ``[B, Hkv]``, valid slots.
        positions: int32 ``[B, Hkv, C]``, original positions of the slots.
        query_mean: ``[B, H, D]`` float32, rotated to the future. Moment form.
        query_cov: ``[B, H, D, D]`` float32, rotated to the future, or None.
        query_samples: ``[B, H, N, D]`` float32, rotated to the future. Sample form, instead of the two above.
        scale: the attention's softmax scale ``c``.
        n_sink: slots with a position below are sinks.
        epsilon: added to the expected attention before the value norm.
        use_value_norm: multiply by the value's norm; without it the score is ``a_t``.
        min_length: rows and heads with fewer valid slots are skipped.
        key_scale: the keys are codes, as in :func:`decode_attention`; on a GPU they are turned into numbers first.
        value_scale: the same of ``value``, given where ``key_scale`` is.
        value_dim: with codes, how many of their numbers the value is, the first: of a latent, part of the key. All by
            default.

    Returns:
        ``[B, Hkv, C]``, float32 (float64 for float64 keys), -inf beyond ``lengths``; unspecified for skipped rows.

    Raises:
        TypeError, ValueError: an argument of another type or shape, or one that requires a gradient; both forms, or
            neither, given.
    """
    columns = _check_keys("score_expected_attention", key, lengths, min_length, key_scale)
    check.check_tensor("value", value, "B Hkv C Dv")
    for dim, what in enumerate(("batch", "heads", "slots")):
        check.check_size("value", value, dim, key.shape[dim], f"key's {what}")
    value_dim = _check_value(key, value, key_scale, value_scale, value_dim)
    check.check_int32("positions", positions, tuple(key.shape[:3]), "B Hkv C", key.device)
    _check_query_statistics(key, columns, query_mean, query_cov, query_samples)
    check.check_no_grad(
        "score_expected_attention",
        value=value,
        query_mean=query_mean,
        query_cov=query_cov,
        query_samples=query_samples,
    )
    check.check_count("n_sink", n_sink, 0)
    _check_epsilon(epsilon)
    if scale is None:
        raise TypeError("scale must be a float, got None")
    return SCORE_EXPECTED_ATTENTION(
        key,
        value,
        lengths,
        positions,
        query_mean,
        query_cov,
        query_samples,
        check.fixed(check.resolve_scale(scale, columns)),
        n_sink,
        check.fixed(float(epsilon)),
        bool(use_value_norm),
        min_length,
        key_scale,
        value_scale,
        value_dim,
    )


def query_moments(query: Tensor, valid: Tensor | None = None, *, min_length: int = 0) -> tuple[Tensor, Tensor]:
    r"""Mean and biased covariance of query vectors, in two float32 passes: Expected Attention's statistics
    (arXiv 2510.00636).

    .. math:: \mu = \mathrm{mean}_i\, q_i,\qquad \Sigma = \mathrm{mean}_i\, (q_i - \mu)(q_i - \mu)^\top

    Args:
        query: ``[B, H, N, D]``, before rotation, float16, bfloat16, float32 or float64.
        valid: bool ``[B, N]``; others may hold anything. All valid by default.
        min_length: rows with fewer valid queries are skipped.

    Returns:
        ``mean [B, H, D]`` and ``cov [B, H, D, D]``, float32 (float64 for float64 queries). No valid query gives
        zeros; skipped rows are unspecified.

    Raises:
        TypeError, ValueError: an argument of another type or shape, or one that requires a gradient.
    """
    check.check_tensor("query", query, "B H N D")
    check.check_same_kind("query", query)
    if valid is not None:
        check.check_tensor("valid", valid, "B N")
        if valid.dtype != torch.bool:
            raise TypeError(f"valid must be bool, got {valid.dtype}")
        check.check_size("valid", valid, 0, query.shape[0], "query's batch")
        check.check_size("valid", valid, 1, query.shape[2], "query's tokens")
        check.check_device("valid", valid, "query", query)
    check.check_count("min_length", min_length, 0)
    check.check_no_grad("query_moments", query=query)
    return QUERY_MOMENTS(query, valid, min_length)


def _check_keys(operator: str, key: Tensor, lengths: Tensor, min_length: int, key_scale: Tensor | None = None) -> int:
    """Keys, which may be codes, and lengths; the head dim."""
    check.check_tensor("key", key, "B Hkv C D")
    if key_scale is None:
        check.check_same_kind("key", key)
        columns = key.shape[3]
    else:
        columns = code_columns(key, check_codes("key", key, "key_scale", key_scale))
    check.check_int32("lengths", lengths, (key.shape[0], key.shape[1]), "B Hkv", key.device)
    check.check_count("min_length", min_length, 0)
    check.check_no_grad(operator, key=key)
    return columns


def _check_value(
    key: Tensor, value: Tensor, key_scale: Tensor | None, value_scale: Tensor | None, value_dim: int | None
) -> int:
    """Values of the keys' kind or storage; how many of their numbers count, 0 for all that are no codes."""
    if key_scale is None:
        if value_scale is not None or value_dim is not None:
            raise TypeError(
                "value_scale and value_dim must be None where key_scale is: both or neither are quantised, got "
                f"value_scale={_shape(value_scale)} and value_dim={value_dim}"
            )
        check.check_same_kind("key", key, value=value)
        return 0
    if value_scale is None:
        raise TypeError("value_scale must be given where key_scale is, got None: both or neither are quantised")
    storage = check_codes("key", key, "key_scale", key_scale)
    of_value = check_codes("value", value, "value_scale", value_scale)
    if of_value != storage:
        raise ValueError(f"value must be stored as key is, in {storage!r}, got {of_value!r}")
    check.check_device("value", value, "key", key)
    columns = code_columns(value, storage)
    if value_dim is None:
        return columns
    check.check_count("value_dim", value_dim, 1)
    if value_dim > columns:
        raise ValueError(f"value_dim must be at most value's head dim {columns}, got {value_dim}")
    return value_dim


def _check_query_statistics(
    key: Tensor, columns: int, query_mean: Tensor | None, query_cov: Tensor | None, query_samples: Tensor | None
) -> None:
    """Exactly one form is given, and its tensors fit the keys."""
    if (query_samples is None) == (query_mean is None) or (query_mean is None and query_cov is not None):
        raise ValueError(
            "give query_mean (and query_cov) or query_samples, not both or neither: got "
            f"query_mean={_shape(query_mean)}, query_cov={_shape(query_cov)}, query_samples={_shape(query_samples)}"
        )
    _check_statistic("query_mean", query_mean, "B H D", key, columns)
    _check_statistic("query_cov", query_cov, "B H D D", key, columns)
    _check_statistic("query_samples", query_samples, "B H N D", key, columns)
    if query_mean is not None and query_cov is not None:
        check.check_size("query_cov", query_cov, 1, query_mean.shape[1], "query_mean's heads")
    if query_samples is not None and query_samples.shape[2] == 0:
        raise ValueError(f"query_samples must hold at least one sample, got {list(query_samples.shape)}")


def _check_epsilon(epsilon: float) -> None:
    if isinstance(epsilon, bool) or not isinstance(epsilon, (int, float, torch.SymFloat)):
        raise TypeError(f"epsilon must be a float, got {type(epsilon).__name__}")
    if not 0.0 <= epsilon < math.inf:  # torch.compile traces comparisons of a symbolic float, not math.isfinite
        raise ValueError(f"epsilon must be finite and not negative, got {epsilon}")


def _check_statistic(name: str, value: Tensor | None, dims: str, key: Tensor, columns: int) -> None:
    if value is None:
        return
    check.check_tensor(name, value, dims)
    expected = accumulator_dtype(key.dtype)
    if value.dtype != expected:
        raise TypeError(f"{name} must be {expected} for {key.dtype} keys, got {value.dtype}")
    check.check_size(name, value, 0, key.shape[0], "key's batch")
    check.check_size(name, value, value.dim() - 1, columns, "key's head dim")
    if dims.endswith("D D"):
        check.check_size(name, value, value.dim() - 2, columns, "key's head dim")
    check.check_groups(value, key, name)
    check.check_device(name, value, "key", key)


def _shape(value: Tensor | None) -> list[int] | None:
    return None if value is None else list(value.shape)


def _score_like(key: Tensor) -> Tensor:
    dtype = accumulator_dtype(key.dtype)
    return key.new_empty(key.shape[:3], dtype=dtype)


def _fake_keys(key: Tensor, *_: object) -> Tensor:
    return _score_like(key)


def _fake_expected_attention(key: Tensor, *_: object) -> Tensor:
    return _score_like(key)


def _fake_moments(query: Tensor, valid: Tensor | None, min_length: int) -> tuple[Tensor, Tensor]:
    batch, heads, _, dim = query.shape
    dtype = accumulator_dtype(query.dtype)
    return (
        query.new_empty(batch, heads, dim, dtype=dtype),
        query.new_empty(batch, heads, dim, dim, dtype=dtype),
    )


_KEYS_SCHEMA = "(Tensor key, Tensor lengths, SymInt min_length, Tensor? key_scale=None) -> Tensor"
SCORE_KNORM = register(
    "score_knorm",
    _KEYS_SCHEMA,
    cpu="fastattn.ops.cpu.scores:score_knorm",
    triton="fastattn.ops.triton.scores:score_knorm",
    fake=_fake_keys,
)
SCORE_KEY_DIFF = register(
    "score_key_diff",
    _KEYS_SCHEMA,
    cpu="fastattn.ops.cpu.scores:score_key_diff",
    triton="fastattn.ops.triton.scores:score_key_diff",
    fake=_fake_keys,
)
SCORE_EXPECTED_ATTENTION = register(
    "score_expected_attention",
    "(Tensor key, Tensor value, Tensor lengths, Tensor positions, Tensor? query_mean, Tensor? query_cov,"
    " Tensor? query_samples, float scale, int n_sink, float epsilon, bool use_value_norm, SymInt min_length,"
    " Tensor? key_scale=None, Tensor? value_scale=None, SymInt value_dim=0) -> Tensor",
    cpu="fastattn.ops.cpu.scores:score_expected_attention",
    triton="fastattn.ops.triton.scores:score_expected_attention",
    fake=_fake_expected_attention,
)
QUERY_MOMENTS = register(
    "query_moments",
    "(Tensor query, Tensor? valid, SymInt min_length) -> (Tensor, Tensor)",
    cpu="fastattn.ops.cpu.scores:query_moments",
    triton="fastattn.ops.triton.moments:query_moments",
    fake=_fake_moments,
)
