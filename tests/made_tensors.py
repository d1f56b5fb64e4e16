"""What operators return while a function runs: how much memory it takes, without a measure of time."""

from torch.utils._python_dispatch import TorchDispatchMode


class Made(TorchDispatchMode):
    """Notes the results of all operators inside the block, in `results`."""

    def __init__(self):
        super().__init__()
        self.results = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.results.append(func(*args, **(kwargs or {})))
        return self.results[-1]
