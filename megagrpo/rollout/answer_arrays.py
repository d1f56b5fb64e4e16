"""Reads the arrays of an engine's answer: log-probabilities, candidates of each token, experts.

A response of 32k tokens has 1 MB of `[[logprob, id, null], ...]`. Most JSON parsers make 130,000
objects of it, which takes eight times as long, and no other thread of the process runs meanwhile.
"""

import binascii
import threading
from contextlib import suppress
from itertools import combinations, islice

import msgspec
import numpy as np
import orjson
import pybase64
import simdjson

from megagrpo.models.architecture import Architecture
from megagrpo.system.errors import translated

_NULL = 9999  # stands for null, which no array of numbers can hold: no log-probability
_NULL_AS_NUMBER = bytes.maketrans(b"nul", b"999")
# RuntimeError: an error about the last answer, which nobody has read yet, holds the parser
_OTHER_FORM = (AttributeError, RuntimeError, TypeError, ValueError)
_THREAD = threading.local()  # a parser keeps its memory for the next answer


def read_pairs(text: bytes | msgspec.Raw) -> tuple[np.ndarray, np.ndarray]:
    """Returns ids [T] int32 and log-probabilities [T] float32 of a list; null is NaN.

    They equal orjson's, bit for bit. Raises ValueError, TypeError and such for anything else.
    """
    with suppress(*_OTHER_FORM):
        return _columns(_numbers(_parsed(bytes(text))))
    pairs = orjson.loads(bytes(text)) or []  # with texts
    logprobs = np.array([pair[0] for pair in pairs], np.float64)
    return np.array([pair[1] for pair in pairs], np.int32), logprobs.astype(np.float32)


def read_lists(
    text: bytes | msgspec.Raw, k: int, skipped: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Returns ids [T, k] int32 and log-probabilities [T, k] float32 of lists [logprob, id, text],
    k for each position, without the first `skipped` positions. Raises ValueError for other
    lists."""
    with suppress(*_OTHER_FORM):
        parsed = _parsed(bytes(text))
        # a position that is skipped is null, which is one number
        numbers = _numbers(parsed)[skipped:]
        each = islice(parsed, skipped, None)
        if all(isinstance(tokens, simdjson.Array) and len(tokens) == k for tokens in each):
            ids, logprobs = _columns(numbers)
            shape = len(parsed) - skipped, k
            return ids.reshape(shape), logprobs.reshape(shape)
    lists = (orjson.loads(bytes(text)) or [])[skipped:]  # with texts
    if any(len(tokens or ()) != k for tokens in lists):
        raise ValueError(f"not {k} tokens for every position")
    pairs = [(token_id, logprob) for tokens in lists for logprob, token_id, *_ in tokens or ()]
    ids, logprobs = np.array(pairs, np.float64).reshape(len(lists), k, 2).transpose(2, 0, 1)
    return ids.astype(np.int32), logprobs.astype(np.float32)


class WrongExperts(ValueError):
    """Raised if an answer has no experts, or some that no router can have chosen."""


def read_experts(arch: Architecture, text: str | memoryview | None, num_tokens: int) -> np.ndarray:
    """Returns the experts [num_tokens, layers with experts, k] of an answer. Raises WrongExperts.

    text: an answer's `routed_experts`, base64 of int32 for all layers, dense ones too, and for
    consecutive tokens that passed through the model: all except the last of a response.
    """
    if not text:
        raise WrongExperts(
            "the answer holds no routed_experts: the engine was not started with "
            "enable_return_routed_experts"
        )
    with translated(
        "routed_experts is not base64 of int32", binascii.Error, ValueError, raised=WrongExperts
    ):
        ids = np.frombuffer(pybase64.b64decode(text, validate=True), dtype="<i4")
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
    experts = experts.astype(arch.routed.id_type)
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


def _parsed(text: bytes) -> simdjson.Array:
    """Returns nested lists of numbers, with _NULL for null. Raises ValueError and such for anything
    else."""
    if not hasattr(_THREAD, "parser"):
        _THREAD.parser = simdjson.Parser()
    return _THREAD.parser.parse(text.translate(_NULL_AS_NUMBER))


def _numbers(parsed: simdjson.Array) -> np.ndarray:
    return np.frombuffer(parsed.as_buffer(of_type="d"))  # float64, by simdjson's name


def _columns(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns ids and log-probabilities of numbers (log-probability, id, _NULL) one after the
    other. Raises ValueError for others, which stand for texts."""
    logprobs, ids, nulls = numbers.reshape(-1, 3).T
    if not (nulls == _NULL).all():
        raise ValueError("no null where a text would be")
    logprobs = np.where(logprobs == _NULL, np.nan, logprobs)
    return ids.astype(np.int32), logprobs.astype(np.float32)
