"""One SGLang engine as trainer rank 0 sees it: its HTTP calls, its mailbox, and what each of its ranks copies."""

import base64
import json
import pickle
import time
from dataclasses import dataclass

import httpx
import torch

from megagrpo.types import EngineInfo
from megagrpo.weights.mailbox import Mailbox, encode
from megagrpo.weights.record import Specs
from megagrpo.weights.views import Box

LOADER = "megagrpo.weights.engine_loader.run"
_CONNECT_S = 10.0
_ANSWER_S = 30.0  # an answer is in the mailbox before the HTTP call returns


class EngineDown(RuntimeError):
    """The engine does not answer: suspect, to be restarted. Any other failure of a call stops the run."""


class Deadline:
    def __init__(self, seconds: float):
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds, at least a little, so that what is ready at the last moment is still taken."""
        return max(self._end - time.monotonic(), 0.01)

    @property
    def over(self) -> bool:
        return time.monotonic() >= self._end


@dataclass(frozen=True)
class Slice:
    """One recorded copy of one engine rank: what part of which HF tensor, and where it lies."""

    hf: str
    box: Box
    parameter: str


class EngineConnection:
    """A connection to one incarnation of an engine with `tp` ranks."""

    def __init__(self, info: EngineInfo, tp: int, mailbox: Mailbox, api_key: str, patience_s: float):
        self.id, self.url, self.incarnation, self.tp, self.patience_s = (
            info.id,
            info.url,
            info.incarnation,
            tp,
            patience_s,
        )
        self.deadline = Deadline(0)  # set by every publish
        self.slices: list[list[Slice]] = []  # by rank, filled by `record`
        self.group = None  # broadcast transport's process group
        self.asked = ""  # the call that it has not answered yet
        self._mailbox = mailbox
        self.address = mailbox.address
        self._http = httpx.Client(base_url=info.url, trust_env=False, headers={"Authorization": f"Bearer {api_key}"})

    def __str__(self) -> str:
        return f"engine {self.id} ({self.url}, incarnation {self.incarnation})"

    @property
    def patience(self) -> float:
        """Seconds for what takes a healthy engine no time, or as long as one forward pass."""
        return min(self.patience_s, self.deadline.left)

    def post(self, path: str, body: dict | None = None, timeout_s: float | None = None) -> dict:
        """POST and require success. Raises EngineDown when nobody answers in time, RuntimeError when the engine refuses.

        `timeout_s` is by default all that is left of the deadline.
        """
        timeout_s = timeout_s or self.deadline.left
        timeout = httpx.Timeout(timeout_s, connect=min(_CONNECT_S, timeout_s))
        self.asked = path
        try:
            response = self._http.post(path, json=body or {}, timeout=timeout)
        except httpx.HTTPError as exc:
            raise EngineDown(f"{self} does not answer {path} ({type(exc).__name__}: {exc})") from exc
        finally:
            self.asked = ""
        if response.status_code != 200:
            raise RuntimeError(f"{self} refuses {path}: {response.status_code} {response.text[:1000]}")
        try:
            return response.json()
        except json.JSONDecodeError:  # /flush_cache answers in prose
            return {"message": response.text}

    def pause(self) -> None:
        self.post("/pause_generation", {"mode": "retract"}, self.patience)

    def resume(self, version: int) -> None:
        self.post("/update_weight_version", {"new_version": str(version), "abort_all_requests": False}, self.patience)
        self.post("/continue_generation", timeout_s=self.patience)

    def begin(self) -> None:
        self.post("/begin_weight_update", timeout_s=self.patience)

    def end(self) -> None:
        self.post("/end_weight_update")

    def end_abandoned_update(self) -> None:
        """End the update in whose middle earlier trainers died; the engine would refuse another. What they loaded is overwritten."""
        try:
            self.end()
        except EngineDown:
            raise
        except RuntimeError:
            pass  # there is none

    def record(self, specs: Specs) -> None:
        """Learn what every rank copies. Raises RuntimeError naming parameters that these HF tensors do not fill."""
        message = {name: (shape, str(dtype).removeprefix("torch.")) for name, (shape, dtype) in specs.items()}
        key = self._mailbox.new_key("specs")
        self._mailbox.put(key, message)
        answers = self._ask("record", {"specs": key})
        self._mailbox.store.delete_key(key)
        problems = [f"rank {rank}: {line}" for rank, answer in enumerate(answers) for line in answer["problems"]]
        if problems:
            raise RuntimeError(f"{self} has parameters that the published tensors do not fill:\n" + "\n".join(problems))
        self.slices = [
            [Slice(hf, Box(tuple(a), tuple(n)), parameter) for hf, a, n, parameter in x["copies"]] for x in answers
        ]
        if derived := sorted({name for answer in answers for name in answer["derived"]}):
            print(
                f"{self}: no digest covers what it holds beside parameters and buffers: {', '.join(derived)}",
                flush=True,
            )

    def digests(self, dtype: torch.dtype) -> tuple[list[list[int]], list[str]]:
        """Digests of the live parameters, by rank, in the order of `slices`, and problems found on the way."""
        answers = self._ask("digest", {"dtype": str(dtype).removeprefix("torch.")})
        problems = [f"{self} rank {rank}: {line}" for rank, answer in enumerate(answers) for line in answer["problems"]]
        return [answer["digests"] for answer in answers], problems

    def leave(self) -> None:
        """Part from a living engine, which then forgets the process group."""
        self.deadline = Deadline(_CONNECT_S)
        if self.group is not None:
            self.post("/destroy_weights_update_group", {"group_name": self.group.name})
        self.close()

    def close(self) -> None:
        """Cut the connections, whatever state the engine is in; what waits for it ends."""
        self._http.close()
        if self.group is not None:
            self.group.abort()
            self.group = None

    def _ask(self, operation: str, request: dict) -> list[dict]:
        """Run an operation of engine_loader on every rank, inside a weight-update session of its own."""
        keys = [self._mailbox.new_key(f"{operation}/{self.id}") for _ in range(self.tp)]
        base = request | {"operation": operation, "mailbox": [self.address, self._mailbox.port]}
        payloads = [_pickled(base | {"reply": key}) for key in keys]
        self.begin()
        self.post(
            "/update_weights_from_tensor",
            {"serialized_named_tensors": payloads, "load_format": LOADER, "flush_cache": False},
        )
        answers = []
        for rank, key in enumerate(keys):
            try:
                answers.append(self._mailbox.take(key, min(_ANSWER_S, self.deadline.left)))
            except torch.distributed.DistStoreError as exc:
                raise EngineDown(
                    f"rank 0 waits for the {operation} of {self} rank {rank}: none after {_ANSWER_S:.0f} s"
                ) from exc
        self.end()
        for rank, answer in enumerate(answers):
            if "error" in answer:
                raise RuntimeError(f"{operation} failed in {self} rank {rank}:\n{answer['error']}")
        return [answer["answer"] for answer in answers]


def _pickled(request: dict) -> str:
    # Plain pickle carries the bytes; torch's own ForkingPickler would pass a shared-memory handle, good on one host only.
    tensor = torch.frombuffer(bytearray(encode(request)), dtype=torch.uint8)
    return base64.b64encode(pickle.dumps([("request", tensor)])).decode()
