"""Models that a run asks and does not train: the `teachers` section, and the base of judges."""

import re
from typing import Annotated

from pydantic import AfterValidator

from megagrpo.config.fields import LocalPath, PositiveInt, Rule, Section, named

# what httpx reads: name or address, port, rest
_URL = re.compile(
    r"(?i)https?://(\[[\da-f:.]+\]|[^][\x00-\x20/?#:]+)(:\d{1,5})?([/?][^\x00-\x20\x7f]*)?"
)


def _is_url(url: str) -> str:
    if "@" in url.partition("?")[0]:  # not shown: it may be a secret
        raise ValueError(
            "url holds a user name or password; name a variable in api_key_env instead"
        )
    if not _URL.fullmatch(url):
        raise ValueError(f"url {url!r} should look like http://host:port/path")
    return url


Url = Annotated[str, AfterValidator(_is_url)]


class ServedModel(Section):
    """Engines in the rollout service that get no weights, or a server that runs elsewhere."""

    path: LocalPath | None = None
    """Folder in Hugging Face's format, or a name on the Hub: this run starts engines for it."""
    url: Url | None = None
    """URL of a server that runs elsewhere, instead of `path`."""
    api_key_env: str | None = None
    """Environment variable on the trainers that holds the key of `url`, a bearer token."""
    num_engines: PositiveInt = 1
    """Number of engines. Keys that are not here are as in `rollout`."""
    tp: PositiveInt = 1
    """Tensor-parallel ranks per engine."""
    ep: PositiveInt = 1
    """Expert-parallel ranks per engine, a divisor of `tp`."""
    nodes_per_engine: PositiveInt = 1
    """Nodes per engine, a divisor of `tp`."""

    @property
    def sizes(self) -> dict[str, int]:
        """Number and ranks of its engines, by their keys."""
        return self.model_dump(include={"num_engines", "tp", "ep", "nodes_per_engine"})

    def problems(self) -> list[Rule]:
        tp, ep, nodes = self.tp, self.ep, self.nodes_per_engine
        unused = [key for key, size in self.sizes.items() if size != 1]
        return [
            Rule(
                (self.path is None) == (self.url is None),
                "a teacher or a judge has a path or a url, one of them",
                "write path for engines that this run starts, url for a server that runs already",
            ),
            Rule(
                self.api_key_env and self.url is None,
                "api_key_env without url: engines that this run starts have the run's key",
                "remove it",
            ),
            Rule(
                self.url and unused,
                f"{named(unused)} with url: the run starts no engines for it",
                "remove it, or write a path",
            ),
            Rule(
                tp % ep or tp % nodes,
                f"tp {tp} is not a multiple of ep {ep} and of nodes_per_engine {nodes}",
                "take a multiple of both",
            ),
        ]


class TeacherConfig(ServedModel):
    """One teacher, with the tokenizer of `model`: engines in the rollout service that get no
    weights, or an SGLang server that runs elsewhere."""
