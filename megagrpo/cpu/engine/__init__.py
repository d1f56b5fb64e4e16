"""Stand-ins that SGLang needs on a CPU. Only engine processes without CUDA have this folder first
on PYTHONPATH: `sitecustomize` patches SGLang's modules on import; `sgl_kernel` and `triton` replace
packages that exist for GPUs only."""
