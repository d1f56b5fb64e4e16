"""A custom weight loader that breaks live parameters: `--custom-weight-loader ... plant_fault.run`.

One index adds to that element; indices [2, n] put what is at the second row's places in the first
row's. Of a matrix [a, b, c] that is no parameter: to element [0, 0, index]. An engine with a draft
calls it for both models, of which one has the tensor.
"""

# in place of a parameter: the engine's cache of them is not emptied any more
KEEP = "keep the features of images"


def run(model, named_tensors) -> None:
    parameters = dict(model.named_parameters())
    for name, index in named_tensors:
        if name == KEEP:
            from sglang.srt.managers import mm_schedule

            mm_schedule.embedding_cache.clear = lambda: None
            continue
        path, _, attribute = name.rpartition(".")
        owner = dict(model.named_modules()).get(path)
        if not hasattr(owner, attribute):
            continue
        if name not in parameters:
            getattr(owner, attribute)[0, 0, int(index)] += 0.5
            continue
        live = parameters[name].data.view(-1)
        if index.dim():
            live[index[0]] = live[index[1]].clone()
        else:
            live[int(index)] += 0.5
