"""A module with parameters of its own, and how checkpoints hold them."""

from megatron.core import parallel_state as mpu
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
    sharded_state_dict_default,
)


class CutModule(MegatronModule):
    """A module with parameters of its own, some of which tensor-parallel ranks divide."""

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict:
        """Returns what a checkpoint holds, any layout's slices of the same tensors."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        ranks = mpu.get_tensor_model_parallel_group()  # beside `metadata`, Megatron has no default
        own: dict = {}
        self._save_to_state_dict(own, "", keep_vars=True)
        cuts = {name: p.partition_dim for name, p in own.items() if hasattr(p, "partition_dim")}
        state = make_sharded_tensors_for_checkpoint(
            own,
            prefix,
            cuts,
            sharded_offsets,
            tp_group=ranks,
            dp_cp_group=metadata["dp_cp_group"],
        )
        for name, module in self.named_children():
            state |= sharded_state_dict_default(
                module, f"{prefix}{name}.", sharded_offsets, metadata, ranks
            )
        return state
