"""Says what lies on a GPU in each phase of a step when engines and trainers share it: `rollout.colocate`."""

from collections.abc import Iterator, Mapping

from megagrpo.planning.trainer_memory import TrainerSide

_AWAY = ("gradients", "optimiser")  # while engines are awake, and until the first backward of an update
_BACK_IN = ("update",)
_AWAKE_IN = ("publish", "rollout")
_PHASES = ("rollout", "logprobs", "reference", "update", "publish")  # in the order of a step


def residency(
    side: TrainerSide, engine_weights: float, mem_fraction: float, reference: bool
) -> Iterator[tuple[str, Mapping[str, float], str]]:
    """Yields phase, bytes of the trainer's parts on the fullest GPU, and what the engine has there.

    engine_weights: bytes of an engine rank. mem_fraction: of the GPU, for its weights and cache together.
    """
    for phase in _PHASES:
        if phase == "reference" and not reference:
            continue
        away = () if phase in _BACK_IN else _AWAY
        parts = {name: size for name, size in side.phases[phase].parts.items() if name not in away}
        engine = "asleep, its context alone"
        if phase in _AWAKE_IN:
            engine = f"weights {engine_weights / 1e9:.3g} GB"
            engine += f" and cache, {mem_fraction:.0%} of the GPU" if phase == "rollout" else ", then its cache"
        yield phase, parts, engine
