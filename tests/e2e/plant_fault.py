"""A custom weight loader that breaks one element of a live parameter: `--custom-weight-loader ... plant_fault.run`."""


def run(model, named_tensors) -> None:
    parameters = dict(model.named_parameters())
    for name, index in named_tensors:
        parameters[name].data.view(-1)[int(index)] += 0.5
