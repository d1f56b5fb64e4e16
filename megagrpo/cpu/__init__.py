"""Everything that is here only because a machine has no GPU, and all that is stood in on one.

Megatron-Core, SGLang, torch, transformers, Ray and gloo are the released packages, and run. The
processes, the weights that travel and their digests, the losses, gradients, optimizer and
checkpoints are those of a run on GPUs. In their place, or below them, stand:

- `trainer.py`: devices, streams and RNG states of torch.cuda, which Megatron asks for.
- `recurrences.py`: kernels of recurrent layers, with which trainers compute Mamba-2 and delta rules.
- `engine_settings.py`: settings and environment of an engine on a CPU (SGLang's own torch backends).
- `engine/`: first on PYTHONPATH of such an engine: `sitecustomize` patches modules of SGLang after
  their import, each patch with its reason; packages for GPUs only (`sgl_kernel`, `triton`,
  `torch_memory_saver`), FP8 products and drafts have their published arithmetic in torch.
- `torchvision_ops.py`: two operators that a torchvision built for CUDA lacks beside a torch without.

The core imports none of it. It asks for it by name where it has found no GPU, in four places:
actor/host.py, models/kinds/recurrent.py, rollout/service/engine_command.py and
system/torchvision.py.
"""
