"""Reads the log-probabilities of an answer, `[[logprob, id, null], ...]`, by numpy: eight digits at a
time, and no Python object for a token.

A response of 32k tokens has 1 MB of them, and a parser of JSON makes 130,000 objects of it: four times
the time, in which no other thread of the process runs.
"""

from contextlib import suppress

import msgspec
import numpy as np
import orjson

_ROOM = b" " * 24  # around the text: a window of eight bytes may begin before it or end after it
_BETWEEN, _LAST = (int.from_bytes(text, "little") for text in (b",null],[", b",null]] "))
_FIRST_BYTES = np.array([(1 << 8 * n) - 1 for n in range(9)], np.uint64)  # masks of 0 to 8 bytes
_EACH = np.uint64(0x0101010101010101)
_BLOCK = 16384  # tokens: intermediate values stay in the processor's cache
_TENTHS = 10.0 ** -np.arange(100.0)


class _Irregular(Exception):
    """Raised for a list in another form than the usual one."""


def read_pairs(text: bytes | msgspec.Raw) -> tuple[np.ndarray, np.ndarray]:
    """Returns ids [T] int32 and log-probabilities [T] float32 of a list; null is NaN.

    They are those of a parser of JSON, bit for bit, for log-probabilities that the engine has in
    float32. Raises ValueError, TypeError and such for what is no such list.
    """
    with suppress(_Irregular):
        return _read_regular(text)
    # spaces, a missing log-probability, a number without a full stop
    pairs = orjson.loads(bytes(text)) or []
    logprobs = np.array([pair[0] for pair in pairs], np.float64)
    return np.array([pair[1] for pair in pairs], np.int32), logprobs.astype(np.float32)


def _read_regular(text: bytes | msgspec.Raw) -> tuple[np.ndarray, np.ndarray]:
    """Reads a list as orjson writes it. Raises _Irregular if anything in it differs."""
    padded = b"".join([_ROOM, text, _ROOM])
    chars = np.frombuffer(padded, np.uint8)
    # of each byte and the next seven, the first in the lowest bits
    windows = np.ndarray(len(padded) - 7, "<u8", padded, strides=(1,))
    commas = np.flatnonzero(chars == ord(","))
    _demand(padded.startswith(b"[[", len(_ROOM)) and len(commas) % 3 == 2)
    after_logprob, after_id = commas[::3], commas[1::3]
    tails = windows[after_id]
    _demand((tails[:-1] == _BETWEEN).all() and tails[-1] == _LAST)
    start = np.append(len(_ROOM) + 2, after_id[:-1] + len(",null],["))
    ids = np.empty(len(start), np.int32)
    logprobs = np.empty(len(start), np.float32)
    for first in range(0, len(start), _BLOCK):
        block = slice(first, first + _BLOCK)
        end, after = after_logprob[block], after_id[block]
        ids[block] = _number(windows[after - 8], after - end - 1, at_end=True)
        logprobs[block] = _decimals(chars, windows, start[block], end)
    return ids, logprobs


def _decimals(
    chars: np.ndarray, windows: np.ndarray, start: np.ndarray, end: np.ndarray
) -> np.ndarray:
    """Returns the numbers [T] float64 from each start to each end."""
    negative = chars[start] == ord("-")
    start = start + negative
    point = start + 1
    for _ in range(2):  # after three digits at most
        point += chars[point] != ord(".")
    _demand((chars[point] == ord(".")).all())
    whole = chars[point - 1] - np.uint8(ord("0"))
    _demand((whole < 10).all())
    whole = whole.astype(np.float64)
    if len(large := np.flatnonzero(point - start > 1)):
        until = point[large]
        whole[large] = _number(windows[until - 8], until - start[large], at_end=True)
    of_one, of_two = (chars[end - n] == ord("e") for n in (3, 4))  # digits of an exponent
    digits_end = end - 3 * of_one - 4 * of_two
    num_digits = digits_end - point - 1
    _demand(num_digits.min() > 0)
    # Sixteen digits: a double has no more, and float32 half of them.
    first = _number(windows[point + 1], np.minimum(num_digits, 8))
    second = _number(windows[point + 9], np.clip(num_digits - 8, 0, 8))
    values = whole + (1e8 * first + second) / 1e16
    if len(small := np.flatnonzero(of_one | of_two)):
        last, mark = end[small], digits_end[small]
        _demand((chars[mark + 1] == ord("-")).all())
        exponent = _number(windows[last - 8], last - mark - 2, at_end=True)
        values[small] *= _TENTHS[exponent]
    return np.negative(values, where=negative, out=values)


def _number(windows: np.ndarray, num_digits: np.ndarray, at_end: bool = False) -> np.ndarray:
    """Returns the numbers [T] int64 that the first num_digits [T] of eight bytes are, as if zeros
    followed; at_end: the last ones."""
    _demand(num_digits.min() >= 0 and num_digits.max() <= 8)
    kept = ~_FIRST_BYTES[8 - num_digits] if at_end else _FIRST_BYTES[num_digits]
    found = (windows ^ (_EACH * np.uint64(ord("0")))) & kept
    _demand(not ((found | (found + _EACH * np.uint64(6))) & (_EACH * np.uint64(0xF0))).any())
    # neighbours become numbers of two digits, four and eight
    for factor, bits, mask in (
        (10, 8, 0x00FF00FF00FF00FF),
        (100, 16, 0x0000FFFF0000FFFF),
        (10000, 32, 0x00000000FFFFFFFF),
    ):
        found *= np.uint64((factor << bits) + 1)
        found >>= np.uint64(bits)
        found &= np.uint64(mask)
    return found.view(np.int64)


def _demand(regular: object) -> None:
    if not regular:
        raise _Irregular
