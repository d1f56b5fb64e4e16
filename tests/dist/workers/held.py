"""What a rank of the actor holds beside its weights, and whether it is gone when it should be."""

import torch

from megagrpo.actor.megatron_actor import MegatronActor


def gradient_buffers(actor: MegatronActor) -> list:
    return [buffer for wrapper in actor.model for buffer in (*wrapper.buffers, *wrapper.expert_parallel_buffers)]


def optimizer_state(actor: MegatronActor) -> list[torch.Tensor]:
    """Adam's moments, without its counts of steps."""
    parts = getattr(actor.optimizer, "chained_optimizers", [actor.optimizer])
    values = [value for part in parts for state in part.optimizer.state.values() for value in state.values()]
    return [value for value in values if torch.is_tensor(value) and value.numel() > 1]


def offload(actor: MegatronActor) -> None:
    """Moves what updates need to the host, and checks that nothing of it is left in its place."""
    in_fp8 = {"weight": torch.ones(1)}  # as Transformer Engine keeps them, in the layers
    next(iter(actor.chunks)).decoder._fp8_workspaces = in_fp8
    actor.update_state.offload()
    assert not in_fp8
    left = [*(buffer.grad_data for buffer in gradient_buffers(actor)), *actor.update_state._tensors()]
    of_model = {p.untyped_storage()._cdata for chunk in actor.chunks for p in chunk.parameters()}
    assert {t.untyped_storage()._cdata for t in optimizer_state(actor)} <= {t.untyped_storage()._cdata for t in left}
    held = sum(t.untyped_storage().nbytes() for t in left if t.untyped_storage()._cdata not in of_model)
    assert left and held == 0, f"{held} bytes are left"
