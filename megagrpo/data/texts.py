"""From a response's token ids to its text."""

import random
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from megagrpo.config.schema import ExperimentConfig, SamplingConfig
from megagrpo.models.config_json import end_tokens
from megagrpo.models.folder import Model
from megagrpo.models.table import read_description

if TYPE_CHECKING:  # seconds to import, and it pulls in torch
    from transformers import PreTrainedTokenizerBase

_BLOCK = 4096  # tokens; what joins them fits into a cache
THOUGHT_END = "</think>"  # ends reasoning in the chat templates of all supported families


def decoder(
    tokenizer: "PreTrainedTokenizerBase", model: Model, sampling: SamplingConfig | None = None
) -> Callable[[np.ndarray], str]:
    """Returns the function from a response's token ids to the text that graders, environments and
    tool parsers see.

    The text keeps special tokens, because `<think>` or `<tool_call>` may be some, but not those for
    padding and the begin and end of texts, nor the one that ended the response, also by
    sampling.stop or stop_token_ids.
    """
    sampling = sampling or SamplingConfig()
    skip_special_tokens = sampling.skip_special_tokens
    added = tokenizer.added_tokens_decoder.items()
    special = {*tokenizer.all_special_ids, *(number for number, token in added if token.special)}
    stops = {number for number, token in added if token.content in sampling.stop}
    ends = special & (end_ids(tokenizer, model) | stops | set(sampling.stop_token_ids))
    left_out = {tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id} & special

    # an engine may sample any id that the model has embeddings for, also one of no token
    known = frozenset(tokenizer.get_vocab().values()) - left_out

    def decode_all(ids: list[int]) -> str:
        ids = [token for token in ids if token in known]
        return str(tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))

    pieces = _pieces(tokenizer, left_out, skip_special_tokens, decode_all)

    def decode(token_ids: np.ndarray) -> str:
        if len(token_ids) and int(token_ids[-1]) in ends:
            token_ids = token_ids[:-1]
        if pieces is None:
            return decode_all(token_ids.tolist())
        return pieces.joined(token_ids)

    return decode


def reasoning_end(config: ExperimentConfig, tokenizer: "PreTrainedTokenizerBase") -> str:
    """Returns the text behind which answers begin, by sampling.reasoning_end; "" if there is none.

    Raises ValueError for a special token that sampling.skip_special_tokens hides.
    """
    sampling = config.sampling
    end = sampling.reasoning_end or ""
    hidden = tokenizer.all_special_tokens if sampling.skip_special_tokens else ()
    if end == "auto":
        template = str(tokenizer.chat_template) if config.data.chat_template else ""
        return THOUGHT_END if THOUGHT_END in template and THOUGHT_END not in hidden else ""
    if end in hidden:
        raise ValueError(
            f"sampling.reasoning_end {end!r} is a special token, which "
            "sampling.skip_special_tokens hides: set that to false"
        )
    return end


@dataclass(frozen=True)
class _Pieces:
    """Holds the bytes of each token; they are joined without an object for each."""

    all_bytes: np.ndarray  # uint8, one token after the other
    starts: np.ndarray  # [largest id + 2] int32; the last is that of every larger id
    sizes: np.ndarray  # [largest id + 2] int32

    @classmethod
    def of(cls, pieces: Sequence[bytes]) -> "_Pieces":
        sizes = np.array(list(map(len, pieces)), np.int32)
        starts = sizes.cumsum(dtype=np.int32) - sizes
        return cls(np.frombuffer(b"".join(pieces), np.uint8), starts, sizes)

    def joined(self, token_ids: np.ndarray) -> str:
        blocks = range(0, len(token_ids), _BLOCK)
        parts = [self._bytes_of(token_ids[start : start + _BLOCK]) for start in blocks]
        return b"".join(parts).decode(errors="replace")

    def _bytes_of(self, token_ids: np.ndarray) -> bytes:
        token_ids = np.minimum(token_ids, len(self.sizes) - 1)
        sizes = self.sizes.take(token_ids)  # faster than by index
        starts = self.starts.take(token_ids)
        starts += sizes
        starts -= sizes.cumsum(dtype=np.int32)
        places = np.repeat(starts, sizes)
        places += np.arange(len(places), dtype=np.int32)
        return self.all_bytes.take(places).tobytes()


def _pieces(
    tokenizer: "PreTrainedTokenizerBase",
    left_out: Set[int],
    skip_special_tokens: bool,
    decode: Callable[[list[int]], str],
) -> _Pieces | None:
    """Returns the bytes of each token if a text is the concatenation of its tokens' bytes, as with
    byte-level tokenizers; else, or if that is not known, None.

    Joining them takes a tenth of the time that the tokenizer takes. left_out: tokens that do not
    become text. decode: the reference.
    """
    from tokenizers.decoders import ByteLevel
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(getattr(backend, "decoder", None), ByteLevel):
        return None
    byte_of = {letter: byte for byte, letter in bytes_to_unicode().items()}
    vocabulary = tokenizer.get_vocab()
    pieces = [b""] * (max(vocabulary.values()) + 2)
    for word, number in vocabulary.items():
        known = byte_of.keys() >= set(word)
        pieces[number] = bytes(byte_of[letter] for letter in word) if known else word.encode()
    added = tokenizer.added_tokens_decoder
    for number, token in added.items():
        if number in left_out or (skip_special_tokens and token.special):
            pieces[number] = b""
    joined = _Pieces.of(pieces)
    tried = [*random.Random(0).choices(range(len(pieces)), k=2000), *added]
    if joined.joined(np.array(tried)) != decode(tried):
        return None
    return joined


def end_ids(tokenizer: "PreTrainedTokenizerBase", model: Model) -> set[int]:
    """Returns the ids at which an engine ends a response of the model by itself."""
    return described_ends(model) | ({tokenizer.eos_token_id} - {None})


def described_ends(model: Model) -> set[int]:
    """Returns the ids of the ends of texts that the model's files name."""
    generation = read_description(model.folder / "generation_config.json")
    descriptions = (generation, model.description, model.description.get("text_config", {}))
    return {end for described in descriptions for end in end_tokens(described)}
