"""Teachers and judges: with the other sections, and the models in their folders."""

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from megagrpo.check.rules import engine_layout, settings
from megagrpo.check.rules.subject import SPARED, Subject, longest_samples, tokenizer_folder
from megagrpo.config.fields import Rule, complaints, named
from megagrpo.config.wording import dotted
from megagrpo.data.vocabulary import different_tokens
from megagrpo.models.config_json import HfConfig, text_part
from megagrpo.models.stored.files import INDEX, as_stored
from megagrpo.models.table import read_description


def as_read(subject: Subject) -> Iterator[Rule]:
    """Yields the rules between `teachers` and the other sections."""
    experiment = subject.experiment
    teachers = experiment.teachers
    distillation = experiment.algorithm.distillation
    temperature = experiment.sampling.temperature
    keys = experiment.data.teacher_key
    urls = [name for name, teacher in teachers.items() if teacher.url]
    odd = [name for name in teachers if not re.fullmatch("[a-z][a-z0-9_]*", name)]
    ids_given = experiment.scoring[1] == "student_topk"
    yield Rule(
        odd,
        f"teachers: {named(odd)}: names are part of metrics and of files",
        "use lower-case letters, digits and _",
    )
    yield Rule(
        teachers and distillation is None,
        "teachers without algorithm.distillation: nothing learns from their scores",
        "add algorithm.distillation: {}, or remove teachers",
    )
    yield Rule(
        distillation is not None and not teachers,
        "algorithm.distillation without teachers",
        "add teachers: {NAME: {path: ...}}",
    )
    yield Rule(
        len(teachers) > 1 and keys is None,
        f"teachers {named(teachers)}, and no data.teacher_key says which one a row has",
        "name its column",
    )
    yield Rule(
        keys is not None and not teachers,
        f"data.teacher_key {keys} without teachers",
        "add them, or remove the key",
    )
    yield Rule(
        teachers and experiment.data.images_key,
        "teachers with data.images_key: they score text only",
        "remove one of both",
    )
    yield Rule(
        urls and temperature != 1,
        f"teachers {named(urls)} with sampling.temperature {temperature:g}: SGLang scores at "
        "temperature 1, unless this run starts its engines",
        "give them a path, or set sampling.temperature: 1",
    )
    yield Rule(
        urls and ids_given,
        f"teachers {named(urls)} with distillation.loss student_topk: SGLang scores one list of "
        "tokens for all positions, unless this run starts its engines",
        "give them a path, or take reverse_kl or teacher_topk",
    )


def before_start(subject: Subject) -> Iterator[Rule]:
    """Yields the rules about the files of served models and the cut of their engines."""
    config = subject.experiment
    for name, model in config.served_models.items():
        if model.path is None or not (folder := Path(model.path)).exists():
            continue
        section = dotted(config.keys_of(name))
        key = f"{section}.path: {folder}"
        if not (folder / "config.json").is_file():
            yield Rule(True, f"{key} holds no config.json, so it is no Hugging Face model folder")
            continue
        if (folder / INDEX).exists():  # without one SGLang reads other files, too
            for text in complaints(list, as_stored(folder)):
                yield Rule(True, f"{section}.path: {text}")
        hf = read_description(folder / "config.json")
        theirs = Subject.of(config.for_model(name), hf)
        for rule in engine_layout.before_start(theirs):
            said = rule.because.replace("rollout.", f"{section}.")
            said = said.replace(f"{section}.sglang", f"{section}: rollout.sglang")
            yield replace(rule, because=said)
        for rule in (rule for rule in settings.as_read(theirs) if rule.when):
            setting = ".".join(map(str, rule.key))
            yield replace(rule, because=f"{section}: {setting}: {rule.because}", key=())
        is_teacher = name.startswith("teacher-")
        yield from _lengths(theirs, key, is_teacher * longest_samples(config)["data"])
        if is_teacher and subject.description is not None:
            yield from _same_tokens(subject, key, folder, hf)


def _lengths(theirs: Subject, key: str, longest: int) -> Iterator[Rule]:
    """Yields the rules about the tokens that a model reads. longest: most that a teacher scores."""
    if theirs.arch is None:  # one of SGLang's models that no trainer has
        return
    positions = theirs.arch.max_positions
    given = theirs.experiment.rollout.sglang
    context = given.get("context_length")
    yield engine_layout.context_rule(theirs.arch, given, key)
    limit = min(positions, context or math.inf, given.get("max_total_tokens") or math.inf) - SPARED
    yield Rule(
        longest > limit,
        f"{key} scores up to {limit} tokens ({SPARED} below its positions or cache), and samples have up to {longest}",
    )


def _same_tokens(subject: Subject, key: str, folder: Path, hf: HfConfig) -> Iterator[Rule]:
    """Yields the rules that a teacher knows the tokens of the trained model, whose tokenizer it
    shares. key: of the teacher, with its folder."""
    assert subject.description is not None, "of the trained model"
    tokenizer = tokenizer_folder(subject.experiment)
    vocabulary, policy = _embeddings(hf), _embeddings(subject.description)
    largest = subject.largest_token_id or 0
    yield Rule(
        vocabulary and largest >= vocabulary,
        f"{key} has {vocabulary} embeddings (vocab_size), but {tokenizer} token id {largest}",
    )
    # a policy may sample every id that it has an embedding for, also one of no token
    yield Rule(
        policy > vocabulary > largest,
        f"{key} has {vocabulary} embeddings (vocab_size), and the policy {policy}: an id "
        "beyond them would end the teacher's engine",
        "take a teacher with at least as many",
    )
    if tokenizer.is_dir() and (problem := different_tokens(folder, tokenizer)):
        yield Rule(True, f"{key} {problem}", "distillation needs the same ids for the same tokens")


def _embeddings(description: HfConfig) -> int:
    """Returns vocab_size of a config.json; 0 if it is not there."""
    return text_part(description).get("vocab_size") or 0
