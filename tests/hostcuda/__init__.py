"""A CUDA device on the host, for the CPU build of torch, in tests only.

Faithful: values (the CPU's kernels compute), device, index and dtype rules, pinned memory, the order of streams and
events (vector clocks), where the host waits, new threads on the first device, CUDA IPC's handles of pools, NCCL's
checks and abort. Not faithful: all is executed at once, so nothing overlaps and no rounding is a GPU's; memory inside
kernels is not counted; NCCL takes two ranks on one device; Triton, Transformer Engine, compiled code and graphs are
absent. The whole list: docs/evidence/pretended-device.md.

device/: C++, one file a concern, compiled by build.py; site/: loads it before torch; cuda.py: the names of torch._C;
storages.py, nccl.py, kernels.py: the rest of a build for CUDA; engine.py: what SGLang needs beside it.
"""
