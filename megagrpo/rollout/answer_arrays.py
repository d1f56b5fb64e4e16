"""The arrays of an engine's answer: log-probabilities, candidates of each token, experts.

Our engines answer in a packed form: _MAGIC, the length of the JSON as 8 bytes, JSON filled up to a
multiple of 8, and arrays to which it refers (_Part). An array of the result is a view of the answer.

Other servers answer in JSON. A response of 32k tokens then has 1 MB of `[[logprob, id, null], ...]`,
of which JSON parsers make 130,000 objects, while no other thread of the process runs. numpy makes an
array, in a third of the time.
"""

import binascii
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import chain, combinations, takewhile

import msgspec
import numpy as np
import orjson
import pybase64

from megagrpo.models.architecture import Architecture
from megagrpo.rollout.response import Answer
from megagrpo.system.errors import translated

PACKED = "application/x-megagrpo-arrays"  # the media type of packed answers
_MAGIC = b"\x93ARRAYS1"  # no text begins so
_ALIGNED = 8  # bytes
_NO_ARRAYS = memoryview(b"")  # of an answer in JSON
_PAIRS = ("output_token_logprobs", "input_token_logprobs")
_LISTS = ("output_top_logprobs", "input_top_logprobs", "input_token_ids_logprobs")
_NUMERIC = b"0123456789+-.eE, \nna"  # of numbers in JSON, and NaN
_ANSWERS = msgspec.json.Decoder(Answer)  # skips other fields, the text among them


class _Part(msgspec.Struct):
    """Stands in the JSON of a packed answer for an array, or for ids int32 and then log-probabilities
    float32 of the same shape."""

    at: int  # its first byte after the JSON
    shape: list[int]
    skipped: int = 0  # null positions before the first
    type: str = ""  # of an array's elements


def pack_answer(answer: Mapping) -> bytes:
    """Returns an answer of SGLang in the packed form, without its text. Lists that are no arrays,
    such as those with texts, stay JSON. Numbers that JSON lacks become NaN, as null does."""
    meta = dict(answer["meta_info"])
    arrays: list[bytes] = []
    found = {name: _in_arrays(meta.get(name) or (), name in _LISTS) for name in _PAIRS + _LISTS}
    found["routed_experts"] = _experts_in_array(meta.get("routed_experts"))
    for name, (part, *values) in ((name, parts) for name, parts in found.items() if parts):
        part.at = sum(map(len, arrays))
        data = b"".join(value.tobytes() for value in values)
        arrays.append(data + bytes(-len(data) % _ALIGNED))
        meta[name] = part
    head = orjson.dumps(
        {**answer, "text": "", "output_ids": (), "meta_info": meta},
        default=msgspec.to_builtins,
        option=orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY,
    )
    head += b" " * (-len(head) % _ALIGNED)
    return b"".join([_MAGIC, len(head).to_bytes(_ALIGNED, "little"), head, *arrays])


def _in_arrays(rows: Sequence, nested: bool) -> tuple | None:
    """Returns a part, ids and log-probabilities of rows (log-probability, id, None), or of lists of
    as many rows; None for others."""
    skipped = len(list(takewhile(lambda row: row is None, rows)))
    rows = rows[skipped:]
    shape = [len(rows)]
    if rows and nested:
        shape.append(len(rows[0]))
        if any(row is None or len(row) != shape[1] for row in rows):
            return None
        rows = list(chain.from_iterable(rows))
    if not rows or any(text for _, _, text in rows):
        return None
    logprobs, ids, _ = zip(*rows, strict=True)
    values = np.array(logprobs, np.float64)
    values[~np.isfinite(values)] = np.nan
    return _Part(0, shape, skipped), np.array(ids, np.int32), values.astype(np.float32)


def _experts_in_array(text: str | None) -> tuple | None:
    """Returns a part and ids of experts, in the smallest type, of base64; None for other texts."""
    if not text:
        return None
    with suppress(binascii.Error, ValueError):
        ids = np.frombuffer(pybase64.b64decode(text, validate=True), dtype="<i4")
        if len(ids) and ids.min() >= 0:
            ids = ids.astype(np.min_scalar_type(ids.max()))
        return _Part(0, [len(ids)], type=ids.dtype.str), ids
    return None


def is_packed(body: bytes) -> bool:
    """Returns whether an answer has the packed form, in which reading takes no time."""
    return body.startswith(_MAGIC)


def read_answer(body: bytes) -> tuple[Answer, memoryview]:
    """Returns an answer in either form, and its arrays for the functions below. Raises
    msgspec.DecodeError."""
    if not is_packed(body):
        return _ANSWERS.decode(body), _NO_ARRAYS
    start = len(_MAGIC) + _ALIGNED
    end = start + int.from_bytes(body[len(_MAGIC) : start], "little")
    return _ANSWERS.decode(memoryview(body)[start:end]), memoryview(body)[end:]


def _part(text: bytes | msgspec.Raw) -> _Part | None:
    """Returns the part of a packed answer to which a field refers, None for a field in JSON."""
    if memoryview(text)[:1] != b"{":
        return None
    return msgspec.json.decode(text, type=_Part)


def _both(part: _Part, arrays: memoryview) -> tuple[np.ndarray, np.ndarray]:
    """Returns a part's ids and log-probabilities. Raises ValueError if the answer is cut off."""
    count = int(np.prod(part.shape))
    ids = np.frombuffer(arrays, "<i4", count, part.at).reshape(part.shape)
    return ids, np.frombuffer(arrays, "<f4", count, part.at + ids.nbytes).reshape(part.shape)


def read_pairs(
    text: bytes | msgspec.Raw, arrays: memoryview = _NO_ARRAYS
) -> tuple[np.ndarray, np.ndarray]:
    """Returns ids [T] int32 and log-probabilities [T] float32 of a list; null is NaN.

    They equal orjson's, bit for bit. Raises ValueError for anything else.
    """
    if part := _part(text):
        return _both(part, arrays)
    return _columns(_numbers(text).reshape(-1, 3))


def read_lists(
    text: bytes | msgspec.Raw,
    k: int,
    skipped: int = 0,
    arrays: memoryview = _NO_ARRAYS,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns ids [T, k] int32 and log-probabilities [T, k] float32 of lists [logprob, id, text],
    k for each position, without the first `skipped` positions, which are null. Raises ValueError
    for other lists."""
    if part := _part(text):
        if (part.shape[1:], part.skipped) != ([k], skipped):
            raise ValueError(f"not {k} tokens for every position")
        return _both(part, arrays)
    numbers = _numbers(text)[skipped:]  # a position that is skipped is null, one number
    if numbers.size % (3 * k):
        raise ValueError(f"not {k} tokens for every position")
    return _columns(numbers.reshape(-1, k, 3))


class WrongExperts(ValueError):
    """Raised if an answer has no experts, or some that no router can have chosen."""


def read_experts(
    arch: Architecture,
    text: bytes | msgspec.Raw,
    num_tokens: int,
    arrays: memoryview = _NO_ARRAYS,
) -> np.ndarray:
    """Returns the experts [num_tokens, layers with experts, k] of an answer. Raises WrongExperts.

    text: an answer's `routed_experts`, in JSON a text, base64 of int32, for all layers, dense ones
    too, and for consecutive tokens that passed through the model: all except the last of a response.
    """
    if memoryview(text) in (b"", b"null"):
        raise WrongExperts(
            "the answer holds no routed_experts: the engine was not started with "
            "enable_return_routed_experts"
        )
    with translated(
        "routed_experts is not base64 of int32", binascii.Error, ValueError, raised=WrongExperts
    ):
        if part := _part(text):
            ids = np.frombuffer(arrays, part.type, part.shape[0], part.at)
        else:
            base64 = memoryview(text)[1:-1]
            ids = np.frombuffer(pybase64.b64decode(base64, validate=True), dtype="<i4")
    layers = arch.num_layers
    k = arch.routed.per_token
    if len(ids) != num_tokens * layers * k:
        raise WrongExperts(
            f"routed_experts has {len(ids)} numbers, not {num_tokens} tokens x "
            f"{layers} layers x {k} experts"
        )
    experts = ids.reshape(num_tokens, layers, k)[:, arch.routed.dense_layers :]
    if experts.size and (experts.min() < 0 or experts.max() >= arch.routed.count):
        raise WrongExperts(
            f"routed_experts has ids from {experts.min()} to {experts.max()}, and the model experts "
            f"0 to {arch.routed.count - 1}"
        )
    experts = experts.astype(arch.routed.id_type, copy=False)
    _refuse_repeated(arch, experts)
    return experts


def _refuse_repeated(arch: Architecture, experts: np.ndarray) -> None:
    repeated = np.zeros(experts.shape[:2], np.bool_)
    # Pair by pair, in a tenth of the time that sorting takes.
    for one, other in combinations(np.ascontiguousarray(np.moveaxis(experts, 2, 0)), 2):
        repeated |= one == other
    # rows that no kernel wrote are 0; with one expert a token 0 is valid too, but not in all tokens
    # and layers
    single = arch.routed.per_token == 1 and len(experts) > 1 and arch.routed.count > 1
    if repeated.any() or (single and not experts.any()):
        layer = arch.routed.dense_layers + int(repeated.any(0).argmax())
        raise WrongExperts(
            f"routed_experts names an expert of layer {layer} twice for a token, or is 0 "
            "everywhere: the engine's kernel for experts does not tell them; set "
            "rollout.sglang.moe_runner_backend: triton"
        )


def _numbers(text: bytes | msgspec.Raw) -> np.ndarray:
    """Returns the numbers of nested lists, float64; null is NaN. Raises ValueError for texts and such
    in them."""
    plain = bytes(text).translate(None, b"[]").replace(b"null", b"nan")
    if plain.translate(None, _NUMERIC) or b",," in plain:
        raise ValueError(f"not lists of numbers: {plain[:100]!r}")
    return np.fromstring(plain, sep=",")


def _columns(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns ids and log-probabilities of numbers [..., 3], which are log-probability, id and NaN.
    Raises ValueError for others."""
    logprobs, ids, nulls = np.moveaxis(numbers, -1, 0)
    if not np.isnan(nulls).all() or np.isnan(ids).any():
        raise ValueError("no log-probability, id and null")
    return ids.astype(np.int32), logprobs.astype(np.float32)
