"""Which tensors an operation of torch writes into: told by its schema, so that no list of names has to be kept."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch


def written(func: Any, args: Sequence[Any], kwargs: "Mapping[str, Any] | None") -> Iterator[torch.Tensor]:
    """Of what a `TorchDispatchMode` is given: those that the operation changes in place, also by `out=`."""
    if not func._schema.is_mutable:
        return
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        given = args[place] if place < len(args) else (kwargs or {}).get(argument.name)
        for each in given if isinstance(given, (list, tuple)) else (given,):
            if isinstance(each, torch.Tensor):
                yield each
