"""Stands in tests for NVIDIA's Transformer Engine: its names and signatures, computed by plain torch on a CPU.

Found where tests/stand_ins is on PYTHONPATH. Megatron's own wrappers subclass and call it as they do the released
package, whose signatures are held in tests/stand_ins/transformer_engine.json. fp8, dropout and what overlaps
communication with products are refused: nothing here pretends to have computed them.
"""

from . import common, pytorch

__version__ = "2.14.1"  # why: docs/evidence/gpu.md
__all__ = ["common", "pytorch"]
