"""What the device computes and refuses; runs in a process that has it. test_device.py names each function."""

import threading

import pytest
import torch

CUDA = torch.device("cuda")


def ones(*shape: int, device: str = "cuda:0", **options) -> torch.Tensor:
    return torch.ones(*shape, device=device, **options)


def refused(pattern: str, error: type[Exception] = RuntimeError):
    return pytest.raises(error, match=pattern)


def index() -> None:
    assert torch.cuda.is_available() and torch.cuda.device_count() == 8
    torch.cuda.set_device(3)
    assert ones(2, device="cuda").device == torch.device("cuda", 3)
    for call in (lambda: torch.cuda.set_device(8), lambda: torch.cuda.use_mem_pool(None, CUDA).__enter__()):
        with pytest.raises((RuntimeError, ValueError, AttributeError)):
            call()
    one, other = ones(2), ones(2, device="cuda:1")
    with refused("at least two devices, cuda:0 and cuda:1"):
        one + other
    with refused("at least two devices, cuda:0 and cpu"):
        one + torch.ones(2)
    assert (one + torch.tensor(1.0) + 1).tolist() == [3.0, 3.0], "numbers of the host are taken"
    with refused("in the same device"):
        one.index_copy_(0, torch.tensor([0]), ones(1))
    with refused("can't convert cuda:0 device type tensor to numpy", TypeError):
        one.numpy()
    assert other.to("cuda:0").device == one.device


def values() -> None:
    weight = torch.randn(4, 4, device="cuda", requires_grad=True)
    x = torch.randn(3, 4, device="cuda")
    (x @ weight).relu().pow(2).sum().backward()
    there = weight.detach().cpu().requires_grad_()
    (x.cpu() @ there).relu().pow(2).sum().backward()
    assert torch.equal(weight.grad.cpu(), there.grad) and weight.grad.is_cuda
    for fused in (False, True):
        torch.optim.AdamW([weight], fused=fused).step()
    assert torch.empty(3, device="cuda").isnan().all(), "memory that nothing wrote"
    storage = x.untyped_storage()
    storage.resize_(0)
    storage.resize_(48)
    assert storage.nbytes() == 48 and x.isnan().all()


def memory() -> None:
    before = torch.cuda.memory_allocated()
    made = ones(1000)
    product = made * 2
    assert torch.cuda.memory_allocated() == before + 8000 and torch.cuda.mem_get_info()[1] == 80 << 30
    del made, product
    assert torch.cuda.memory_allocated() == before < torch.cuda.max_memory_allocated()


def dtype() -> None:
    from torch.nn.attention.varlen import varlen_attn

    half = ones(8, 8, dtype=torch.bfloat16)
    assert torch.mm(half, half, out_dtype=torch.float32).dtype == torch.float32
    with pytest.raises((RuntimeError, AssertionError)):
        torch.mm(half, half, out=ones(8, 8))
    with pytest.raises((RuntimeError, AssertionError)):
        torch.mm(half.float(), half, out_dtype=torch.float32)
    q = ones(8, 2, 8, dtype=torch.bfloat16)
    lengths = torch.tensor([0, 3, 8], device="cuda")
    with pytest.raises((RuntimeError, AssertionError)):
        varlen_attn(q, q, q, lengths, lengths, 5, 5)
    lengths = lengths.int()
    found = varlen_attn(q, q, q, lengths, lengths, 5, 5, window_size=(-1, 0))
    assert torch.allclose(found.float(), ones(8, 2, 8), atol=1e-2)


def pinned() -> None:
    host = torch.arange(4.0).pin_memory()
    assert host.is_pinned() and not torch.ones(4).is_pinned()
    there = host.to("cuda", non_blocking=True)
    host.zero_()
    with refused("pinned memory was written while it was copied"):
        torch.cuda.synchronize()
    assert there.tolist() == [0, 1, 2, 3]
    kept = torch.zeros(4)
    runtime = torch.cuda.cudart()
    assert runtime.cudaHostRegister(kept.data_ptr(), kept.nbytes, 0) == 0 and kept.is_pinned()
    assert runtime.cudaHostRegister(kept.data_ptr(), kept.nbytes, 0) != 0, "twice"
    kept.copy_(there, non_blocking=True)
    assert kept.tolist() == [0, 0, 0, 0], "not yet"
    torch.cuda.current_stream().synchronize()
    assert kept.tolist() == [0, 1, 2, 3]
    assert runtime.cudaHostUnregister(kept.data_ptr()) == 0 and not kept.is_pinned()


def waits() -> None:
    from bench.gpu_kit.timing import synchronizations

    with synchronizations(CUDA) as found:
        x = ones(4).cumsum(0)
        x.index_fill_(0, x.argmax()[None], 2)
        torch.arange(4.0).pin_memory().to("cuda", non_blocking=True)
    assert not found, found
    with synchronizations(CUDA) as found:
        float(x[0]), x[x > 1], x.tolist(), x.cpu(), torch.arange(4.0).to("cuda", non_blocking=True)
    assert found.total() == 5, found


def streams() -> None:
    x, side = ones(4), torch.cuda.Stream()
    assert side.cuda_stream and not torch.cuda.current_stream().cuda_stream
    with torch.cuda.stream(side), refused("reads in stream .* of cuda:0 what .* writes in stream 0"):
        x + 1
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        assert torch.cuda.current_stream() == side
        y = x + 1
    with refused("nothing has ordered the two"):
        y * 2
    done = side.record_event()
    torch.cuda.current_stream().wait_event(done)
    y * 2
    with torch.cuda.stream(side), refused("writes in stream"):
        x.add_(y)
        side.wait_stream(torch.cuda.default_stream())
        y.zero_()
        del done
        x.mul_(2)
        torch.cuda.default_stream().wait_event(torch.cuda.Event())
        (ones(2, device="cuda:0") + 1).sum()
        with torch.cuda.stream(torch.cuda.Stream()):
            x.zero_()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    with pytest.raises((RuntimeError, ValueError)):
        start.elapsed_time(end)
    ones(1)
    end.record()
    with refused("device not ready"):
        start.elapsed_time(end)
    end.synchronize()
    assert start.elapsed_time(end) >= 0


def freed() -> None:
    x, side = ones(1000), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x + 1
    del x
    with refused("no record_stream"):
        ones(1)
    z = ones(1000)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y += z
    z.record_stream(side)
    del z
    ones(1)


def pool() -> None:
    from torch.multiprocessing.reductions import reduce_tensor

    with refused("only memory made in a pool"):
        reduce_tensor(ones(4))
    with torch.cuda.use_mem_pool(torch.cuda.MemPool(), device=torch.device("cuda", 0)):
        x = ones(4)
        with pytest.raises(AssertionError, match="a pool inside of another"):
            torch.cuda.use_mem_pool(torch.cuda.MemPool()).__enter__()
    rebuild, arguments = reduce_tensor(x)
    there = rebuild(*arguments)
    x.fill_(5)
    torch.cuda.synchronize()
    assert there.tolist() == [5.0] * 4
    torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    with torch.cuda.use_mem_pool(torch.cuda.MemPool()):
        x = ones(4)
    with refused("of plain segments"):
        reduce_tensor(x)


def threads() -> None:
    torch.cuda.set_device(3)
    found = []
    thread = threading.Thread(target=lambda: found.append(torch.cuda.current_device()))
    thread.start()
    thread.join()
    assert found == [0] and torch.cuda.current_device() == 3
    with torch.cuda.stream(torch.cuda.Stream()), refused("while a stream of cuda:3 is current"):
        ones(2, device="cuda:1").add_(1)


def hidden() -> None:
    from megagrpo.actor.host import prepare_host

    assert prepare_host("cpu") == torch.device("cpu") and not torch.cuda.is_available()
    with refused("No CUDA GPUs are available"):
        torch.cuda.init()
