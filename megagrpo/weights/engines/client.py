"""Rank 0's client of one SGLang engine: HTTP calls, mailbox, and the copy lists of its ranks."""

import base64
import pickle
import socket
import ssl
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

import httpx
import numpy as np
import torch

from megagrpo.config.schema import RolloutConfig
from megagrpo.system.environment import WEIGHT_LOADER
from megagrpo.types import EngineInfo
from megagrpo.weights.wire.clock import Deadline
from megagrpo.weights.wire.mailbox import Mailbox, encode
from megagrpo.weights.wire.shared_buffer import Place

_CONNECT_S = 10.0
_ANSWER_S = 30.0  # the answer is sent to the mailbox before the HTTP call returns
_POLL_S = 0.05
# For all engines: a context takes 0.8 ms, one with certificates 50.
_NO_CERTIFICATES = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


class EngineDown(RuntimeError):
    """The engine does not answer and should be restarted."""


class EngineRefused(RuntimeError):
    """The engine answers with an error. A restart would not help, so this stops the run."""


class EngineConnection:
    """A connection to one incarnation of an engine with `tp` ranks. Every publish sets `deadline`.

    patience_s: the seconds that a healthy engine may need for an idle call or one forward pass.
    """

    def __init__(
        self,
        info: EngineInfo,
        tp: int,
        mailbox: Mailbox,
        api_key: str,
        patience_s: float,
    ):
        self.id = info.id
        self.url = info.url
        self.incarnation = info.incarnation
        self.tp = tp
        self.deadline = Deadline(0)
        # by rank, set by `record`: the mailbox's key of the rank's copy list
        self.copies: tuple[str, ...] = ()
        self.kind = -1  # index in EngineFleet.kinds of what the ranks' parameters hold
        self.emptied = False  # whether the exchange has emptied the engine's caches
        self.places: list[Place] = []  # by rank, set by `record`: where the rank runs
        # set by `record`: names of HF tensors that must be in one load_weights
        self.together: set[tuple[str, ...]] = set()
        self._asked: list[str] = []  # unanswered calls, of several threads
        self.address = mailbox.access[0]  # of this host, as the engine reaches it
        self.mailbox = mailbox
        self._patience_s = patience_s
        # whether the engine speculates: SGLang then passes requests to both models, the draft last
        self.has_draft = False
        # of the HTTP connections, one for each concurrent call
        self._sockets: list[socket.socket] = []
        self._closed = False
        self._lock = threading.Lock()
        self._http = httpx.Client(
            base_url=info.url,
            trust_env=False,
            verify=info.url.startswith("https") or _NO_CERTIFICATES,
            headers={"Authorization": f"Bearer {api_key}"},
            # or a call may close a connection that another call has
            limits=httpx.Limits(max_keepalive_connections=0),
        )

    def __str__(self) -> str:
        return f"engine {self.id} ({self.url}, incarnation {self.incarnation})"

    @property
    def asked(self) -> str:
        """Returns the oldest unanswered call, "" for none."""
        return next(iter(self._asked), "")

    @property
    def patience(self) -> float:
        """Returns `patience_s` in seconds, at most half of the rest of the deadline: a quarter of the
        publish, so that an engine that hangs leaves time to the others."""
        return min(self._patience_s, self.deadline.left / 2)

    def post(
        self, path: str, body: dict | None = None, timeout_s: float | None = None
    ) -> httpx.Response:
        """Posts and returns the successful answer. Raises EngineDown for a timeout, EngineRefused
        for an error status.

        timeout_s: by default the rest of the deadline. The answer never has the result of a custom
        weight loader.
        """
        timeout_s = timeout_s or self.deadline.left
        timeout = httpx.Timeout(timeout_s, connect=min(_CONNECT_S, timeout_s))
        if self._closed:
            raise EngineDown(f"{self} was given up before {path}")
        self._asked.append(path)
        try:
            response = self._http.post(
                path, json=body or {}, timeout=timeout, extensions={"trace": self._trace}
            )
        except httpx.HTTPError as exc:
            raise EngineDown(
                f"{self} does not answer {path} ({type(exc).__name__}: {exc})"
            ) from exc
        finally:
            self._asked.remove(path)
        if response.status_code != 200:
            raise EngineRefused(
                f"{self} refuses {path}: {response.status_code} {response.text[:1000]}"
            )
        return response

    def pause(self) -> None:
        """Stops sampling. Requests in flight are retracted and sampled again after `resume`."""
        self.post("/pause_generation", {"mode": "retract"}, self.patience)

    def resume(self, version: int) -> None:
        """Sets the version of the weights and goes on sampling."""
        self.post(
            "/update_weight_version",
            {"new_version": str(version), "abort_all_requests": False},
            self.patience,
        )
        self.post("/continue_generation", timeout_s=self.patience)

    def begin(self) -> None:
        """Opens a weight-update session, which distributed and tensor updates need."""
        self.post("/begin_weight_update", timeout_s=self.patience)

    def end(self) -> None:
        """Closes the session; the engine may process the loaded weights."""
        self.post("/end_weight_update")

    def record(self, specs: str, past_loader: bool, rollout: RolloutConfig) -> None:
        """Records the copy list of every rank.

        specs: the mailbox's key of the HF tensors, with published dtypes. past_loader: see
        Transport. An engine with a dummy start has random values, also in buffers of the
        checkpoint; one that sleeps loses all but its buffers. Raises RuntimeError naming parameters
        that these tensors do not fill, or buffers that cannot be updated.
        """
        dummy_start = rollout.load_format == "dummy"
        request = {"specs": specs, "allow_computed": past_loader, "dummy_start": dummy_start}
        answers = self.ask("record", [request] * self.tp)
        if problems := _lines("rank", answers):
            raise RuntimeError(
                f"{self} has parameters that the published tensors do not fill:\n"
                + "\n".join(problems)
            )
        self.copies = tuple(answer["copies"] for answer in answers)
        self.places = [Place(*answer["place"]) for answer in answers]
        self.together = {tuple(names) for answer in answers for names in answer["together"]}
        computed = {
            f"{name} from {how}" for answer in answers for name, how in answer["computed"].items()
        }
        if computed:
            print(
                f"{self}: not copied but computed by its loader, which gets whole tensors: "
                + ", ".join(sorted(computed))
            )
        derived = {name for answer in answers for name in answer["derived"]}
        if derived and past_loader and not answers[0]["post_load"]:
            raise RuntimeError(
                f"{self} holds, besides parameters and buffers, {', '.join(sorted(derived))}, "
                "perhaps computed from weights on loading, and its model has no "
                "post_load_weights: use weights.transport: broadcast"
            )
        unknown = {
            name for answer in answers for name in answer["derived"] if name not in answer["proven"]
        }
        if unknown:
            names = ", ".join(sorted(unknown))
            if rollout.colocate:
                raise RuntimeError(
                    f"{self} would lose {names} in its sleep, and no publish brings them back: "
                    "give engines of this model GPUs of their own (rollout.colocate: false)"
                )
            if rollout.quantization:
                raise RuntimeError(
                    f"{self} holds {names} besides FP8 parameters, and no digest covers them"
                )
            print(
                f"{self}: no digest covers {names}, which it holds besides parameters and buffers",
                flush=True,
            )

    def digests(self, flush: bool) -> tuple[list[np.ndarray], list[str]]:
        """Returns live digests, by rank, and problems. flush: the engine also empties
        its KV cache."""
        answers = self.ask("digest", [{}] * self.tp, flush)
        return [
            np.frombuffer(base64.b64decode(answer["digests"]), dtype="<i8") for answer in answers
        ], _lines(f"{self} rank", answers)

    def close(self) -> None:
        """Cuts the HTTP connections, whatever the engine does. A call in progress raises
        EngineDown."""
        self._closed = True
        if self.asked and self._sockets:
            # Closing would not wake the thread that reads from the socket, which might then read
            # from the next socket with this number. That thread closes it.
            for connection in self._sockets:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        else:
            self._http.close()

    def _trace(self, event: str, info: dict) -> None:
        """Stores the socket of a new connection, which httpx exposes nowhere else."""
        if event == "connection.connect_tcp.complete":
            with self._lock:
                still_open = [
                    connection for connection in self._sockets if connection.fileno() >= 0
                ]
                self._sockets = [*still_open, info["return_value"].get_extra_info("socket")]

    def ask(
        self, operation: str, requests: Sequence[Mapping[str, object]], flush: bool = False
    ) -> list[dict]:
        """Runs an operation of loader.py on every rank, inside a separate weight-update session.

        requests: by rank. flush: also empties the KV cache. Returns answers by rank. Raises
        EngineDown if one does not come, RuntimeError with the traceback of a rank in which the
        operation failed.
        """
        keys = [self.mailbox.new_key(f"{operation}/{self.id}") for _ in range(self.tp)]
        base = {
            "operation": operation,
            "mailbox": self.mailbox.access,
            "draft": self.has_draft,
        }
        payloads = [
            _pickled({**base, **request, "reply": key})
            for request, key in zip(requests, keys, strict=True)
        ]
        self.begin()
        self.post(
            "/update_weights_from_tensor",
            {
                "serialized_named_tensors": payloads,
                "load_format": WEIGHT_LOADER,
                "flush_cache": flush,
                "torch_empty_cache": False,  # on a CPU it takes longer than the proof
            },
        )
        answers = []
        for rank, key in enumerate(keys):
            limit = self.deadline.part(_ANSWER_S)
            # not Mailbox.wait, which holds up the threads of all other engines
            while not self.mailbox.has(key):
                if limit.over:
                    raise EngineDown(
                        f"rank 0 waits for the {operation} of {self} rank {rank}: none after {limit.seconds:.0f} s"
                    )
                time.sleep(_POLL_S)
            answers.append(self.mailbox.get(key))
            self.mailbox.delete(key)
        self.end()
        for rank, answer in enumerate(answers):
            if "error" in answer:
                raise RuntimeError(f"{operation} failed in {self} rank {rank}:\n{answer['error']}")
        return [answer["answer"] for answer in answers]


def _lines(rank: str, answers: Sequence[Mapping]) -> list[str]:
    """Returns the problems of all ranks, each after `rank` and the rank's number."""
    return [
        f"{rank} {number}: {line}"
        for number, answer in enumerate(answers)
        for line in answer["problems"]
    ]


def _pickled(request: dict) -> str:
    # Plain pickle carries the bytes. torch's ForkingPickler would pass a shared-memory handle of
    # this host.
    tensor = torch.frombuffer(bytearray(encode(request)), dtype=torch.uint8)
    return base64.b64encode(pickle.dumps([("request", tensor)])).decode()
