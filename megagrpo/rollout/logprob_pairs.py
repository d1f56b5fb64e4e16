"""Reads the log-probabilities of an answer, `[[logprob, id, null], ...]`, into arrays.

A response of 32k tokens has 1 MB of them, and most parsers of JSON make 130,000 objects of it: eight
times the time, in which no other thread of the process runs.
"""

import threading
from contextlib import suppress

import msgspec
import numpy as np
import orjson
import simdjson

_NULL = 9999  # stands for null, which no array of numbers can hold: no log-probability
_NULL_AS_NUMBER = bytes.maketrans(b"nul", b"999")
_OF_THREAD = threading.local()  # a parser keeps its memory for the next answer


def read_pairs(text: bytes | msgspec.Raw) -> tuple[np.ndarray, np.ndarray]:
    """Returns ids [T] int32 and log-probabilities [T] float32 of a list; null is NaN.

    They are those of orjson, bit for bit. Raises ValueError, TypeError and such for what is no such
    list.
    """
    with suppress(AttributeError, TypeError, ValueError):
        logprobs, ids, nulls = _numbers(bytes(text)).reshape(-1, 3).T
        if (nulls == _NULL).all():
            logprobs = np.where(logprobs == _NULL, np.nan, logprobs)
            return ids.astype(np.int32), logprobs.astype(np.float32)
    pairs = orjson.loads(bytes(text)) or []  # with texts
    logprobs = np.array([pair[0] for pair in pairs], np.float64)
    return np.array([pair[1] for pair in pairs], np.int32), logprobs.astype(np.float32)


def _numbers(text: bytes) -> np.ndarray:
    """Returns all numbers of nested lists, float64, null too. Raises ValueError and such if they
    hold anything else."""
    if not hasattr(_OF_THREAD, "parser"):
        _OF_THREAD.parser = simdjson.Parser()
    parsed = _OF_THREAD.parser.parse(text.translate(_NULL_AS_NUMBER))
    return np.frombuffer(parsed.as_buffer(of_type="d"))
