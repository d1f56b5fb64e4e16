"""Stands in for Triton, 700 MB that a CPU imports and never runs: SGLang defines its GPU kernels at
load time.

Every `triton.x.y` can be imported and every name in it exists: lower case a module that is also a
decorator which returns the function as it is, upper case a class. Calling a kernel fails, as it
must.
"""

import importlib.abc
import importlib.machinery
import sys
import types


class _Stub(types.ModuleType):
    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        if name[0].isupper():
            # Exception: some of these names stand in `except` clauses. Subscripts: some are generic
            # base classes.
            made = type(
                name, (Exception,), {"__class_getitem__": classmethod(lambda cls, item: cls)}
            )
        else:
            made = importlib.import_module(f"{self.__name__}.{name}")
        setattr(self, name, made)
        return made

    def __call__(self, *args, **kwargs):
        if len(args) == 1 and callable(args[0]) and not kwargs:
            return args[0]  # @triton.jit
        return lambda function: function  # @triton.autotune(...)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        return (
            importlib.machinery.ModuleSpec(name, self, is_package=True)
            if name.startswith("triton.")
            else None
        )

    def create_module(self, spec):
        return _Stub(spec.name)

    def exec_module(self, module):
        pass


class _Config:
    """Holds what @triton.autotune is given; torch inspects the signature."""

    def __init__(self, kwargs=None, num_warps=4, num_stages=2, **others):
        self.kwargs = kwargs or {}
        self.num_warps = num_warps
        self.num_stages = num_stages


class _Constexpr:
    """Annotation and value wrapper, e.g. `BLOCK = tl.constexpr(64)` in a module's body."""

    def __init__(self, value=None):
        self.value = value


_this = sys.modules[__name__]
_this.__class__ = _Stub
sys.meta_path.insert(0, _Finder())
_this.__version__ = "3.0.0"
_this.Config = _Config
_this.cdiv = lambda a, b: -(a // -b)
_this.next_power_of_2 = lambda n: 1 << (n - 1).bit_length() if n > 0 else 1
_this.language.constexpr = _Constexpr
_this.backends.backends = {}  # torch asks whether "cpu" is in it
_this.language.core.view = lambda input, shape: None  # torch inspects its signature
