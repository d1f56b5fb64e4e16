"""A custom weight loader that breaks live parameters: `--custom-weight-loader ... plant_fault.run`.

One index adds to that element; indices [2, n] put what is at the second row's places in the first row's.
"""


def run(model, named_tensors) -> None:
    parameters = dict(model.named_parameters())
    for name, index in named_tensors:
        live = parameters[name].data.view(-1)
        if index.dim():
            live[index[0]] = live[index[1]].clone()
        else:
            live[int(index)] += 0.5
