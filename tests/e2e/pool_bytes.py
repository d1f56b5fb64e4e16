"""An operation of an engine's loader (see EngineEnd.answer): the bytes of the engine's caches."""

import gc


def _bytes(model, request) -> dict[str, int]:
    from sglang.srt.mem_cache.memory_pool import MambaPool, MHATokenToKVPool, MLATokenToKVPool

    gc.unfreeze()  # a server freezes what it has after its start
    held = {MambaPool: 0, MHATokenToKVPool: 0, MLATokenToKVPool: 0}
    for pool in [thing for thing in gc.get_objects() if isinstance(thing, tuple(held))]:
        if isinstance(pool, MambaPool):
            held[MambaPool] += sum(t.nbytes for t in [*pool.mamba_cache.conv, pool.mamba_cache.temporal])
        elif isinstance(pool, MLATokenToKVPool):
            held[MLATokenToKVPool] += sum(t.nbytes for t in pool.kv_buffer)
        else:
            held[MHATokenToKVPool] += sum(t.nbytes for t in [*pool.k_buffer, *pool.v_buffer])
    names = ("states", "keys and values", "latents")
    return dict(zip(names, held.values(), strict=True))


OPERATIONS = {"bytes": _bytes}
