"""Plants 25 faults that only a GPU could show, one at a time, and runs the tests on the pretended
device that must find them.

    python bench/plant_device.py [--only TEXT]

As bench/plant.py, whose Fault says what a row is. The faults were drawn before the device was
finished. Writes bench/results/plant_device.{json,md}, not with --only.
"""

import sys

from plant import Fault, main

_WAITS = "hostcuda/test_waits.py::test_the_host_waits_where_it_is_documented_and_nowhere_else"
_PUBLISH = "hostcuda/test_dist.py::test_a_publish_outlives_an_engine"
UPDATE = (f"{_WAITS}[qwen3]",)
LAYOUT = ("hostcuda/test_layouts.py",)
RESHARD, IPC = (f"{_PUBLISH}[reshard]",), (f"{_PUBLISH}[ipc]",)
OFFLOAD = ("hostcuda/test_dist.py::test_checkpoints_and_offload",)

FAULTS = (
    # index
    Fault(
        "index: a device without one",
        "actor/host.py",
        'torch.device("cuda", environment.get_int("LOCAL_RANK", 0))',
        'torch.device("cuda")',
        UPDATE,
    ),
    Fault(
        "index: every rank on the first GPU",
        "actor/host.py",
        'torch.device("cuda", environment.get_int("LOCAL_RANK", 0))',
        'torch.device("cuda", 0)',
        LAYOUT,
    ),
    Fault(
        "index: positions of packed rows on the host",
        "models/kinds/grouped_query/layer.py",
        "torch.arange(longest, device=query.device)",
        "torch.arange(longest)",
        LAYOUT,
    ),
    Fault(
        "index: a handle is opened on the first GPU",
        "weights/wire/shared_buffer.py",
        "torch.cuda.current_device() if device.index is None else device.index",
        "0",
        IPC,
    ),
    # stream
    Fault(
        "stream: digests do not wait for the update",
        "weights/expected_digests.py",
        "self._stream.wait_stream(torch.cuda.default_stream())",
        "pass",
        RESHARD,
    ),
    Fault(
        "stream: digests are read before they are computed",
        "weights/expected_digests.py",
        "self._stream.synchronize()",
        "pass",
        RESHARD,
    ),
    Fault(
        "stream: multipliers of one stream are cached for all",
        "weights/digests/digest.py",
        "return torch.cuda.current_stream(tensor.device).cuda_stream if tensor.is_cuda else 0",
        "return 0",
        RESHARD,
    ),
    # pinned
    Fault(
        "pinned: copies from pageable memory",
        "types.py",
        "tensor.pin_memory().to(device, non_blocking=True)",
        "tensor.to(device, non_blocking=True)",
        UPDATE,
    ),
    Fault(
        "pinned: half of a host buffer",
        "actor/host_buffer.py",
        "cudaHostRegister(self._pinned, len(whole), 0)",
        "cudaHostRegister(self._pinned, len(whole) // 2, 0)",
        OFFLOAD,
    ),
    Fault(
        "pinned: memory is freed while it is registered",
        "actor/host_buffer.py",
        "torch.cuda.cudart().cudaHostUnregister(self._pinned)",
        "pass",
        OFFLOAD,
    ),
    # dtype
    Fault(
        "dtype: a float32 product of bfloat16",
        "algo/logprob.py",
        "torch.mm(left, right, out_dtype=torch.float32, out=out)",
        "torch.mm(left, right, out=out)",
        UPDATE,
    ),
    Fault(
        "dtype: int64 lengths for the kernel",
        "models/kinds/grouped_query/layer.py",
        "cu = packed.cu_seqlens_q\n",
        "cu = packed.cu_seqlens_q.long()\n",
        UPDATE,
    ),
    Fault(
        "dtype: the gradient of the head in float32 meets bfloat16",
        "algo/logprob.py",
        "torch.mm(grad.to(other.dtype), other, out_dtype=torch.float32)",
        "torch.mm(grad, other, out_dtype=torch.float32)",
        UPDATE,
    ),
    # sync
    Fault(
        "sync: memory is given back before its copy is done",
        "actor/update_state.py",
        "host.copy_(_bytes_of(storage), non_blocking=True)\n        self._synchronize()",
        "host.copy_(_bytes_of(storage), non_blocking=True)",
        OFFLOAD,
    ),
    Fault(
        "sync: a loss is read after each micro-batch",
        "actor/step.py",
        "out[on_device(micro.trained, out.device)] = values.detach()",
        "float(values.sum()), out.index_put_((on_device(micro.trained, out.device),), values.detach())",
        UPDATE,
    ),
    Fault(
        "sync: copies to the device wait",
        "types.py",
        "tensor.pin_memory().to(device, non_blocking=True)",
        "tensor.pin_memory().to(device)",
        UPDATE,
    ),
    Fault(
        "sync: spans are read before the device has run them",
        "actor/timing.py",
        "torch.cuda.synchronize()",
        "pass",
        UPDATE,
    ),
    # pool
    Fault(
        "pool: a shared buffer among other tensors",
        "weights/wire/shared_buffer.py",
        "with _plain_segments(), torch.cuda.use_mem_pool(self._pool, device=device):",
        "with _plain_segments():",
        IPC,
    ),
    Fault(
        "pool: a shared buffer in expandable segments",
        "weights/wire/shared_buffer.py",
        "with _plain_segments(), torch.cuda.use_mem_pool(self._pool, device=device):",
        "with torch.cuda.use_mem_pool(self._pool, device=device):",
        IPC,
    ),
    # thread
    Fault(
        "thread: reshard's threads compute on the first GPU",
        "weights/transports/reshard.py",
        "torch.cuda.set_device(device)  # each thread has its own",
        "pass",
        RESHARD,
    ),
    Fault(
        "thread: ipc's thread computes on the first GPU",
        "weights/transports/ipc.py",
        "torch.cuda.set_device(device)  # each thread has its own",
        "pass",
        IPC,
    ),
    Fault(
        "thread: the digests' stream is the first GPU's",
        "weights/expected_digests.py",
        "with torch.cuda.device(device):  # a new thread begins on the first one",
        "if True:",
        RESHARD,
    ),
    # peer
    Fault(
        "peer: no abort",
        "weights/wire/engine_group.py",
        "backend.abort()",
        "pass",
        RESHARD,
    ),
    Fault(
        "peer: a wait does not see its deadline pass",
        "weights/wire/engine_group.py",
        "if deadline.over:",
        "if False:",
        RESHARD,
    ),
    Fault(
        "peer: messages of a batch are not one launch",
        "weights/wire/engine_group.py",
        "backend._start_coalescing()",
        "pass",
        RESHARD,
    ),
)


if __name__ == "__main__":
    sys.exit(main(FAULTS, "plant_device"))
