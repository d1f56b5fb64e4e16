"""Compares begin and end of responses with those of the chat template's turns and of teachers'
texts."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from megagrpo.config.fields import named
from megagrpo.config.schema import ExperimentConfig
from megagrpo.data.messages import render_messages
from megagrpo.data.texts import described_ends, end_ids
from megagrpo.models.folder import Model
from megagrpo.rollout.agents.renderer import ANSWER, PROBE

if TYPE_CHECKING:  # seconds to import, and it pulls in torch
    from transformers import PreTrainedTokenizerBase


def end_advice(
    config: ExperimentConfig, tokenizer: "PreTrainedTokenizerBase", model: Model
) -> Iterator[str]:
    """Yields why prompts may not begin, or responses not end, where a text or a turn does. Raises what
    the chat template raises, and ValueError for a teacher without config.json."""
    sampling = config.sampling
    data = config.data
    prompt, remedy = "text", "data.add_bos: true or data.prompt_template writes it"
    if data.chat_template:
        prompt = render_messages(data, tokenizer, PROBE[:1])
        remedy = "write it into the chat template, or take another model.tokenizer"
    first, *others = (
        tokenizer(text, add_special_tokens=special)["input_ids"][:1]
        for text, special in (("text", True), ("text", False), (prompt, False))
    )
    if first not in others and not data.add_bos:
        yield (
            f"the tokenizer begins texts with {named(tokenizer.convert_ids_to_tokens(first))}, "
            f"without which the model may never have read one, and prompts do not: {remedy}"
        )
    ends = end_ids(tokenizer, model) | set(sampling.stop_token_ids)
    words = named(tokenizer.convert_ids_to_tokens(sorted(ends)))
    if data.chat_template:
        whole = render_messages(data, tokenizer, PROBE, ready=False)
        before, _, tail = whole.rpartition(ANSWER)
        asked, begun = (
            render_messages(data, tokenizer, PROBE[:1], ready) for ready in (False, True)
        )
        begin = before.removeprefix(asked)
        if asked == begun and before.startswith(asked) and begin.strip():
            yield (
                f"the chat template begins an answer with {begin!r:.60}, but writes no generation "
                "prompt: every response has to begin with that; take another model.tokenizer"
            )
        ids = tokenizer(tail, add_special_tokens=False)["input_ids"]
        if not ends.intersection(ids) and not any(stop in tail for stop in sampling.stop):
            yield (
                f"the chat template ends an answer with {tail!r:.60}, and engines end a response at "
                f"{words}: responses may run on to max_response_tokens; name that text in "
                "sampling.stop, or take another model.tokenizer"
            )
    for name, teacher in config.teachers.items():
        if teacher.path is None:
            continue
        theirs = described_ends(Model.read(teacher.path))
        if theirs and theirs.isdisjoint(ends):
            yield (
                f"teachers.{name} ends a text with token {named(map(str, theirs))}, and the policy's "
                f"responses end at {words}: it would learn not to end; set sampling.stop_token_ids "
                "to those, or take a teacher with the same end"
            )
