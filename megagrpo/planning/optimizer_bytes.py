"""Says what one trained element costs in gradients and optimiser state, as the experiment sets Megatron's optimizer."""

from dataclasses import dataclass

from megagrpo.config.actor import ActorConfig

_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "fp8": 1}


@dataclass(frozen=True)
class OptimizerBytes:
    """Bytes of one trained element."""

    gradient: float  # of the buffer that every rank holds
    state: float  # on the GPU, of the ranks that share it
    host: float  # on the host, of the ranks that share it


def optimizer_bytes(actor: ActorConfig) -> OptimizerBytes:
    """Returns the bytes of main gradients, of float32 weights beside bfloat16 ones, and of both moments.

    On the host there are float32 weights, gradients and moments, whatever the types are on the GPU. Remainders (the 16
    bits that bfloat16 leaves out) are kept instead of float32 weights where they are on, as they are by default.
    """
    given = actor.optimizer.megatron
    if actor.dtype == "float32":
        return OptimizerBytes(gradient=4, state=8, host=0)
    aware = bool(given.get("use_precision_aware_optimizer"))
    gradient = _BYTES[given.get("main_grads_dtype", "float32")]
    master = _BYTES[given.get("main_params_dtype", "float32")]
    if aware and master == 4 and given.get("store_param_remainders", True):
        master = 2
    moments = sum(_BYTES[given.get(name, "float32")] for name in ("exp_avg_dtype", "exp_avg_sq_dtype"))
    if given.get("optimizer_cpu_offload"):
        share = given.get("optimizer_offload_fraction", 1.0)
        return OptimizerBytes(gradient, state=12 * (1 - share), host=16 * share)
    return OptimizerBytes(gradient, state=master + moments, host=0)
