"""What SGLang needs on a CPU beside its released package. This folder goes first on PYTHONPATH of engine processes
without CUDA, and of no other process: `sitecustomize` repairs SGLang's modules as they load, `sgl_kernel` and `triton`
stand in for packages that exist for GPUs only."""
