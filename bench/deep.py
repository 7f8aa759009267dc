"""How much memory hangs on an object."""

import gc
import sys
from types import FunctionType, ModuleType

import msgspec


def deep_size(root: object) -> int:
    """Bytes of all that can be reached from it, each thing once; without classes, functions and modules."""
    seen, waiting, total = {id(root)}, [root], 0
    while waiting:
        found = waiting.pop()
        total += len(bytes(found)) if isinstance(found, msgspec.Raw) else sys.getsizeof(found)  # Raw does not know
        for each in gc.get_referents(found):
            if id(each) not in seen and not isinstance(each, type | ModuleType | FunctionType):
                seen.add(id(each))
                waiting.append(each)
    return total
