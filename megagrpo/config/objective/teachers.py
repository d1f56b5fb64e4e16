"""The `teachers` section: models that score responses for on-policy distillation."""

from megagrpo.config.fields import LocalPath, PositiveInt, Rule, Section


class TeacherConfig(Section):
    """One teacher: engines in the rollout service that get no weights, or a server that runs
    elsewhere."""

    path: LocalPath | None = None
    """Folder in Hugging Face's format, or a name on the Hub. The tokenizer must be that of
    `model`."""
    url: str | None = None
    """SGLang server with the teacher's weights that runs elsewhere, instead of `path`."""
    api_key_env: str | None = None
    """Environment variable on the trainers that holds the key of `url`, a bearer token."""
    num_engines: PositiveInt = 1
    """Number of teacher engines. Keys that are not here are as in `rollout`."""
    tp: PositiveInt = 1
    """Tensor-parallel ranks per engine."""
    ep: PositiveInt = 1
    """Expert-parallel ranks per engine, a divisor of `tp`."""
    nodes_per_engine: PositiveInt = 1
    """Nodes per engine, a divisor of `tp`."""

    def problems(self) -> list[Rule]:
        tp, ep, nodes = self.tp, self.ep, self.nodes_per_engine
        return [
            Rule(
                (self.path is None) == (self.url is None),
                "a teacher has a path or a url, one of them",
                "write path for engines that this run starts, url for a server that runs already",
            ),
            Rule(
                self.url and not self.url.startswith(("http://", "https://")),
                f"url {self.url} is none of a server",
                "write http://HOST:PORT",
            ),
            Rule(
                self.api_key_env and self.url is None,
                "api_key_env without url: engines that this run starts have the run's key",
                "remove it",
            ),
            Rule(
                tp % ep or tp % nodes,
                f"tp {tp} is not a multiple of ep {ep} and of nodes_per_engine {nodes}",
                "take a multiple of both",
            ),
        ]
