"""One running engine: samples responses, and records prefills of given tokens by hooks on its
model."""

import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from megagrpo.data.images import ImageStore
from megagrpo.tools.bisect import hooks
from megagrpo.tools.bisect.compared_points import TOWER
from megagrpo.tools.bisect.hooks import Tap
from megagrpo.types import EngineInfo, Prompt
from megagrpo.weights.engines.client import EngineConnection
from megagrpo.weights.wire.clock import Deadline
from megagrpo.weights.wire.mailbox import Mailbox, address_towards, listening_store

_PASSES = Tap("passes", "model.embed_tokens", "out")  # has a row for each token


class Sequenced(NamedTuple):
    """A prompt and the response that the engine sampled at temperature 1."""

    prompt: Prompt
    response: list[int]
    logprobs: list[float]  # of the response's tokens, from decoding
    version: str  # of the weights, by the engine's own count

    @property
    def tokens(self) -> list[int]:
        """Returns those of both."""
        return self.prompt.token_ids.tolist() + self.response

    @property
    def is_text(self) -> list[bool]:
        """Tells for each token whether it is none of an image, whose ids an engine replaces."""
        pad = {int(self.prompt.token_ids[image.start]) for image in self.prompt.images}
        return [token not in pad for token in self.tokens]


class Prefilled(NamedTuple):
    """The records of one capture."""

    ranks: list[dict[str, list[Tensor]]]  # by engine rank: by tap, a tensor for each forward pass
    logprobs: list[list[float]]  # by sequence: of its tokens from the second on
    problems: list[str]


class ProbedEngine:
    """Connection to one incarnation of an engine with `tp` ranks, which has no other requests
    meanwhile.

    folder: for its ranks' files, on a disk shared with this process. limit_s: seconds for each
    answer. images: those of its prompts.
    """

    def __init__(
        self,
        info: EngineInfo,
        tp: int,
        api_key: str,
        folder: Path,
        limit_s: float,
        images: ImageStore | None = None,
    ):
        mailbox = Mailbox(listening_store(address_towards(info.url), limit_s))
        self._engine = EngineConnection(info, tp, mailbox, api_key, limit_s)
        self._folder = folder
        self._limit_s = limit_s
        self._images = images

    def sample(
        self, prompts: Sequence[Prompt], max_new_tokens: int, stop: Sequence[int] = ()
    ) -> list[Sequenced]:
        """Returns the prompts with responses, sampled one after the other: each is the only one of
        its batch.

        stop: ids that are in no response; one that they leave empty is sampled again.
        """
        sampling = {
            "max_new_tokens": max_new_tokens,
            "temperature": 1.0,
            "stop_token_ids": list(stop),
        }
        return [self._sampled(prompt, sampling, set(stop)) for prompt in prompts]

    def _sampled(self, prompt: Prompt, sampling: dict, stop: set[int]) -> Sequenced:
        while True:
            meta = (out := self._generate(prompt, [], sampling))["meta_info"]
            response = [token for token in out["output_ids"] if token not in stop]
            logprobs = [entry[0] for entry in meta["output_token_logprobs"]][: len(response)]
            if response:
                return Sequenced(prompt, response, logprobs, str(meta["weight_version"]))

    def prefill(self, sequences: Sequence[Sequenced], taps: Sequence[Tap]) -> Prefilled:
        """Computes whole sequences without the prefix cache; returns the records of the taps."""
        answers = self._request("capture", [{"taps": [*taps, _PASSES]}] * self._engine.tp)
        logprobs = []
        once = {"max_new_tokens": 1, "temperature": 1.0}
        for sequence in sequences:
            out = self._generate(sequence.prompt, sequence.response, once, logprob_start_len=0)
            logprobs.append([entry[0] for entry in out["meta_info"]["input_token_logprobs"][1:]])
        files = [
            self._folder / f"engine_rank{rank}.{secrets.token_hex(4)}.pt"
            for rank in range(self._engine.tp)
        ]
        problems = [
            f"the engine's model has no {module}"
            for answer in answers
            for module in answer["missing"]
        ]
        for answer in self._request("read", [{"file": str(file)} for file in files]):
            problems += answer["problems"]
        ranks = [
            only_prefills(torch.load(file), [len(sequence.tokens) for sequence in sequences])
            for file in files
        ]
        for file in files:
            file.unlink()
        return Prefilled(ranks, logprobs, list(dict.fromkeys(problems)))

    def resume(self) -> None:
        """Resumes generation, which a failed verification leaves paused."""
        self._engine.post("/continue_generation", timeout_s=self._limit_s)

    def close(self) -> None:
        """Closes the connections; the engine keeps running."""
        self._engine.close()

    def _request(self, operation: str, requests: list[dict]) -> list[dict]:
        self._engine.deadline = Deadline(self._limit_s)
        self._engine.pause()
        named = [{"module": hooks.__name__, **request} for request in requests]
        answers = self._engine.ask(operation, named)
        self._engine.post("/continue_generation")
        return answers

    def _generate(self, prompt: Prompt, response: list[int], sampling: dict, **more: int) -> dict:
        own_prefix = secrets.token_hex(8)  # the cache would leave one token to compute
        body = {
            "sampling_params": sampling,
            "return_logprob": True,
            "extra_key": own_prefix,
            **more,
        }
        sent = prompt.token_ids if prompt.short_ids is None else prompt.short_ids
        body["input_ids"] = sent.tolist() + response
        if prompt.images:
            assert self._images is not None, "the prompts were loaded with a store"
            body["image_data"] = [self._images.uri(image.key) for image in prompt.images]
        return self._engine.post("/generate", body, self._limit_s).json()


def only_prefills(seen: dict[str, list[Tensor]], lengths: Sequence[int]) -> dict[str, list[Tensor]]:
    """Returns the records without decode passes, of sequences of these lengths prefilled one by
    one.

    An overlapping scheduler starts a decode step before a response of one token has ended. If the
    passes do not add up to the lengths, or a module was not called once in each, its records stay
    complete; a tower's always do.
    """
    sizes = [len(rows) for rows in seen[_PASSES.key]]
    kept = []
    at = 0
    for length in lengths:
        while length > 0 and at < len(sizes):
            kept.append(at)
            length = length - sizes[at]
            at = at + 1
        if length:
            kept = list(range(len(sizes)))
            break
        while at < len(sizes) and sizes[at] == 1:  # a sequence has at least two tokens
            at += 1
    return {
        key: [calls[number] for number in kept]
        if len(calls) == len(sizes) and not key.startswith(TOWER)
        else calls
        for key, calls in seen.items()
        if key != _PASSES.key
    }
