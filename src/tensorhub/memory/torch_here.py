"""torch, where it is installed and can be loaded; elsewhere tensors are numpy arrays.

Never: raise what torch's own import raises, or load torch for who has only looked.
"""

import contextlib
import importlib
import logging
import sys
from contextlib import ExitStack
from typing import Any

from ..transport import threads

_log = logging.getLogger(__name__)

INSTALL = "install torch"

_why_not = ""  # what would help, once it could not be loaded


def seen_torch() -> Any:
    """torch, if this process has loaded it already. Loads nothing."""
    found = sys.modules.get("torch")
    return found if hasattr(found, "Tensor") else None  # a folder of that name can be imported too


def outside_modes() -> ExitStack:
    """A block in which torch works on memory, whatever mode or transform its caller is in.

    That is `FakeTensorMode`, a default device such as "meta", a mode of the caller's own, and `torch.func`.
    """
    with ExitStack() as block:
        torch = seen_torch()
        if torch is not None:
            block.enter_context(torch._C.DisableTorchFunction())
            block.enter_context(importlib.import_module("torch.utils._python_dispatch")._disable_current_modes())
            with contextlib.suppress(ImportError, AttributeError):  # not every torch has it
                functorch = importlib.import_module("torch._functorch.pyfunctorch")
                block.enter_context(functorch.temporarily_clear_interpreter_stack())
        return block.pop_all()


def loaded_torch() -> Any:
    """torch, loaded. None where it is not installed, or cannot be loaded, which is logged once.

    Raises `Unavailable` where it cannot for want of descriptors or memory: that is not remembered.
    """
    global _why_not
    if seen_torch() is None and not _why_not:
        _why_not = _load()
    return seen_torch()


def what_helps() -> str:
    """The hint of an error that is there for want of torch."""
    return _why_not if loaded_torch() is None else INSTALL


def _load() -> str:
    try:
        importlib.import_module("torch")
        if seen_torch() is None:
            raise ImportError("it has no tensors")
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "torch":
            return INSTALL
        if threads.is_shortage(error):
            raise threads.unavailable(error, "it loaded torch") from error
        why = f"{type(error).__name__}: {error}".splitlines()[0]
        _log.warning("torch is installed and cannot be loaded: numpy does without it (%s)", why)
        return f"torch is installed here and cannot be loaded ({why}): mend it, or install it anew"
    return ""
