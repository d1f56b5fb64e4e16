"""A custom weight loader that breaks live parameters: `--custom-weight-loader ... plant_fault.run`.

One index adds to that element; indices [2, n] put what is at the second row's places in the first row's.
"""

KEEP = "keep the features of images"  # in place of a parameter: the engine's cache of them is not emptied any more


def run(model, named_tensors) -> None:
    parameters = dict(model.named_parameters())
    for name, index in named_tensors:
        if name == KEEP:
            from sglang.srt.managers import mm_schedule

            mm_schedule.embedding_cache.clear = lambda: None
            continue
        live = parameters[name].data.view(-1)
        if index.dim():
            live[index[0]] = live[index[1]].clone()
        else:
            live[int(index)] += 0.5
