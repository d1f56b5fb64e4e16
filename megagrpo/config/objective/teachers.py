"""The `teachers` section: models that score responses for on-policy distillation."""

import re
from typing import TYPE_CHECKING

from megagrpo.config.fields import LocalPath, PositiveInt, Rule, Section, named

if TYPE_CHECKING:
    from megagrpo.config.schema import ExperimentConfig


class TeacherConfig(Section):
    """One teacher: engines in the rollout service that get no weights, or a server that runs
    elsewhere."""

    path: LocalPath | None = None
    """Folder in Hugging Face's format, or a name on the Hub. The tokenizer must be that of
    `model`."""
    url: str | None = None
    """SGLang server with the teacher's weights that runs elsewhere, instead of `path`."""
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
                tp % ep or tp % nodes,
                f"tp {tp} is not a multiple of ep {ep} and of nodes_per_engine {nodes}",
                "take a multiple of both",
            ),
        ]


def teacher_rules(experiment: "ExperimentConfig") -> list[Rule]:
    """Rules between `teachers` and the other sections, broken or not."""
    teachers = experiment.teachers
    distillation = experiment.algorithm.distillation
    temperature = experiment.sampling.temperature
    keys = experiment.data.teacher_key
    paths = [name for name, teacher in teachers.items() if teacher.path]
    urls = [name for name, teacher in teachers.items() if teacher.url]
    odd = [name for name in teachers if not re.fullmatch("[a-z][a-z0-9_]*", name)]
    ids_given = experiment.scoring[1] == "student_topk"
    return [
        Rule(
            odd,
            f"teachers: {named(odd)}: names are part of metrics and of files",
            "use lower-case letters, digits and _",
        ),
        Rule(
            teachers and distillation is None,
            "teachers without algorithm.distillation: nothing learns from their scores",
            "add algorithm.distillation: {}, or remove teachers",
        ),
        Rule(
            distillation is not None and not teachers,
            "algorithm.distillation without teachers",
            "add teachers: {NAME: {path: ...}}",
        ),
        Rule(
            len(teachers) > 1 and keys is None,
            f"teachers {named(teachers)}, and no data.teacher_key says which one a row has",
            "name its column",
        ),
        Rule(
            keys is not None and not teachers,
            f"data.teacher_key {keys} without teachers",
            "add them, or remove the key",
        ),
        Rule(
            teachers and experiment.data.images_key,
            "teachers with data.images_key: they score text only",
            "remove one of both",
        ),
        Rule(
            paths and experiment.rollout.colocate,
            f"teachers {named(paths)} under rollout.colocate: the trainers' GPUs have no room for "
            "engines that never sleep",
            "give a teacher the url of a server that runs elsewhere",
        ),
        Rule(
            urls and temperature != 1,
            f"teachers {named(urls)} with sampling.temperature {temperature:g}: SGLang scores at "
            "temperature 1, unless this run starts its engines",
            "give them a path, or set sampling.temperature: 1",
        ),
        Rule(
            urls and ids_given,
            f"teachers {named(urls)} with distillation.loss student_topk: SGLang scores one list of "
            "tokens for all positions, unless this run starts its engines",
            "give them a path, or take reverse_kl or teacher_topk",
        ),
    ]
