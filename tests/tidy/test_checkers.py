"""The checkers bite: each is given code that breaks its rule, and code that only looks as if it did."""

import pytest

from .c_shape import c_violations
from .circles import circle_violations
from .core_order import order_violations, ownership_violations
from .dangers import blind_violations, noqa_violations, sleep_violations, unsafe_violations
from .eager import lazy_violations
from .error_tree import drawn_tree
from .layers import layer_violations
from .pure_rules import rule_violations
from .purity import purity_violations
from .shape import shape_violations
from .sources import snippet

# --- layers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("core/a.py", "from tensorhub.runtime import server"),
        ("core/a.py", "from ..runtime.server import Server"),
        ("core/a.py", "from .. import runtime"),
        ("core/a.py", "def f():\n    import tensorhub.transport.tcp"),
        ("core/a.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ..memory import host"),
        ("core/a.py", "import numpy"),
        ("core/__init__.py", "from ..sim import cluster"),
        ("transport/tcp.py", "from ..memory.host import Piece"),
        ("memory/host.py", "from ..runtime import client"),
        ("memory/host.py", "import aiohttp"),
        ("runtime/server.py", "import torch"),
        ("runtime/server.py", "from tensorhub import open"),
        ("integrations/vllm.py", "from ..runtime import client"),
        ("api.py", "from .demo import trainer"),
        ("api.py", "from . import sim"),
        ("sim/cluster.py", "from ..runtime import client"),
        ("runtime/server.py", "from ..sim import runner"),
        ("cli/main.py", "import requests"),
    ],
)
def test_layers_bite(path: str, code: str) -> None:
    assert layer_violations(snippet(code, f"src/tensorhub/{path}"))


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("core/a.py", "import msgspec\nfrom .names import Version\nfrom tensorhub.core import errors"),
        ("runtime/server.py", "import aiohttp\nfrom ..core.server import Server\nfrom ..transport import tcp"),
        ("api.py", "from .runtime import client\nfrom .memory import registration"),
        ("cli/main.py", "import typer\nfrom ..sim import runner\nfrom .. import connect"),
        ("integrations/vllm.py", "import tensorhub\nfrom .. import open"),
        ("sim/cluster.py", "from ..core.server import Server"),
    ],
)
def test_layers_let_pass(path: str, code: str) -> None:
    assert layer_violations(snippet(code, f"src/tensorhub/{path}")) == []


# --- generators in the server's half of the core ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("server/rules/calls.py", "found = (each for each in others)"),
        ("server/rules/calls.py", "for each in (known(other) for other in others):\n    pass"),
        ("server/facts.py", "first = list(islice((each for each in others), 3))"),
        ("server/facts.py", "most = max(*(each for each in others))"),
    ],
)
def test_generators_find(path: str, code: str) -> None:
    assert lazy_violations(snippet(code, f"src/tensorhub/core/{path}"))


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("server/facts.py", "found = [each for each in others]"),
        ("server/facts.py", "is_there = any(each.ready for each in others)"),
        ("server/state.py", "used.update(each.name for each in others)"),
        ("worker/call.py", "found = (each for each in others)"),
    ],
)
def test_generators_let_pass(path: str, code: str) -> None:
    assert lazy_violations(snippet(code, f"src/tensorhub/core/{path}")) == []


# --- the order of files inside the core -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("worker/buffer.py", "from .state import WorkerState"),
        ("worker/buffer.py", "from . import machine"),
        ("worker/filling.py", "from .filling import take_back"),
        ("worker/state.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .machine import Worker"),
        ("worker/newcomer.py", "from .buffer import RegisteredMemory"),
        ("worker/machine.py", "from ..server import Server"),
        ("worker/machine.py", "from ..server import membership"),
        ("worker/machine.py", "from tensorhub.core.server.groups import Replica"),
        ("server/facts.py", "from .machine import Server"),
        ("server/facts.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .apply import carry_out"),
        ("server/facts.py", "from . import apply"),
        ("server/facts.py", "from .rules import sources"),
        ("server/rules/sources.py", "from . import grants"),
        ("server/rules/sources.py", "from ..intake import take_report"),
        ("server/rules/sources.py", "from tensorhub.core.server import machine"),
        ("server/rules/newcomer.py", "from .sources import candidates"),
        ("server/membership.py", "from ..worker.report_book import ReportBook"),
        ("server/membership.py", "from .. import worker"),
        ("server/membership.py", "from .. import aside"),
        ("messages.py", "from .server.state import State"),
        ("names.py", "from .messages import Report"),
        ("names.py", "from tensorhub.core.worker import events"),
    ],
)
def test_the_order_inside_the_core_bites(path: str, code: str) -> None:
    assert order_violations(snippet(code, f"src/tensorhub/core/{path}"))


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("worker/state.py", "from .buffer import RegisteredMemory\nfrom ..names import Version"),
        ("worker/machine.py", "from . import events, filling\nfrom ..messages import Orders"),
        ("server/groups.py", "from ..version_spec import call_text\nfrom .. import messages"),
        ("server/rules/sources.py", "from ...messages import Report\nfrom .. import facts\nfrom .wanted import Wanted"),
        ("server/rules/sources.py", "from ..state import State\nfrom . import witness"),
        ("server/__init__.py", "from .machine import Server"),
    ],
)
def test_the_order_inside_the_core_lets_pass(path: str, code: str) -> None:
    assert order_violations(snippet(code, f"src/tensorhub/core/{path}")) == []


def test_a_buffer_is_changed_in_one_file() -> None:
    code = "def f(worker):\n    worker.memory.buffer, worker.memory.serving = 1, 2\n    worker.memory.withdrawn_in += 1"
    assert len(ownership_violations(snippet(code, "src/tensorhub/core/worker/filling.py"))) == 3
    assert ownership_violations(snippet(code, "src/tensorhub/core/worker/buffer.py")) == []
    code = "def f(worker):\n    return worker.memory.buffer == worker.memory.serving"
    assert ownership_violations(snippet(code, "src/tensorhub/core/worker/filling.py")) == []


# --- rules that change nothing ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [
        "member.is_drained = True",
        "member.moves += 1",
        "record.holders[shard] = {}",
        "del member.left[worker]",
        "found, member.left = 1, {}",
        "state.mark_dirty(worker)",
        "member.releasing.update(found)",
        "state.members.wake(member, 1.0)",
        "model.record(version)",
        "record.holders.setdefault(shard, {})[worker] = None",
    ],
)
def test_rules_that_change_something_are_found(line: str) -> None:
    code = f"def rule(state, model, member, record):\n    {line}\n"
    assert rule_violations(snippet(code, "src/tensorhub/core/server/rules/sources.py"))


def test_rules_may_fill_what_they_make() -> None:
    code = "def rule(state):\n    found, other = {}, []\n    found[1] = 2\n    found.setdefault(2, []).append(3)\n"
    assert rule_violations(snippet(code, "src/tensorhub/core/server/rules/sources.py")) == []


# --- purity -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "code",
    [
        "import time",
        "from time import monotonic",
        "import os.path",
        "def f():\n    import secrets",
        "from datetime import datetime",
        "import random",
        "x = id(object())",
        "x = hash('a')",
        "print('x')",
        "for x in {1, 2}:\n    pass",
        "for x in set(names):\n    pass",
        "x = [y for y in frozenset(names)]",
        "names = {a for a in b}\nfirst = next(iter(names))",
        "def f(a, b):\n    return a.keys() & b.keys()",
        "for x in a.keys() - gone:\n    pass",
        "x = min(set(names))",
        "NAMES = frozenset({'a', 'b'})\nfor name in NAMES:\n    pass",
        "def f():\n    seen = set()\n    return seen",
        "def f():\n    seen = {1}\n    for x in seen:\n        pass",
        "def f():\n    seen = {1}\n    return seen.pop()",
        "def f():\n    seen = {1}\n    return list(seen | {2})",
        "class A:\n    def __init__(self):\n        self.seen = set()",
        "x = list({1, 2} | {3})",
    ],
)
def test_purity_bites(code: str) -> None:
    assert purity_violations(snippet(code))


@pytest.mark.parametrize(
    "code",
    [
        "from math import inf\nfrom collections import deque\nimport msgspec",
        "if x in {1, 2}:\n    pass",
        "NAMES = frozenset({'a'})\nok = 'a' in NAMES",
        "x = sorted(set(a) - set(b))",
        "x = len({y for y in z})",
        "ok = set(a) <= set(b)",
        "for x in sorted(a.keys() & b.keys()):\n    pass",
        "x: dict[str, set[int]] = {}",
        "def f():\n    seen = set()\n    seen.add(1)\n    return 1 in seen and sorted(seen | {2})",
        "x = a.id() + b.hash()",
        "n = 3 - 1 | 4",
    ],
)
def test_purity_lets_pass(code: str) -> None:
    assert purity_violations(snippet(code)) == []


SIM = "src/tensorhub/sim/draw.py"


@pytest.mark.parametrize(
    "code",
    [
        "import random\nx = random.random()",
        "import random\nrandom.seed(1)",
        "from random import choice",
        "import random\nr = random.Random()",
        "import random\nr = random.SystemRandom()",
        "import time",
        "import multiprocessing",
    ],
)
def test_simulator_has_chance_only_from_its_seed(code: str) -> None:
    assert purity_violations(snippet(code, SIM))


def test_simulator_may_draw_from_a_seed() -> None:
    code = "import random\nfrom random import Random\nr = random.Random(7)\ns = Random(seed)\nx = r.random()"
    assert purity_violations(snippet(code, SIM)) == []


def test_only_the_runner_may_use_processes() -> None:
    code = "import time\nfrom concurrent.futures import ProcessPoolExecutor"
    assert purity_violations(snippet(code, "src/tensorhub/sim/runner.py")) == []
    assert len(purity_violations(snippet(code, SIM))) == 2


# --- shape ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "code",
    [
        "x = 1",
        '"""Doc."""\ndef f():\n    return 1',
        '"""Doc."""\nclass A:\n    pass',
        '"""Doc."""\nasync def f():\n    return 1',
        '"""Doc."""\n' + "x = 1\n" * 900,
        '"""Doc."""\ndef _f():\n' + "    x = 1\n" * 70,
        '"""Doc."""\nclass _A:\n    def f(self):\n' + "        x = 1\n" * 70,
    ],
)
def test_shape_bites(code: str) -> None:
    assert shape_violations(snippet(code))


def test_shape_lets_pass() -> None:
    code = '"""Doc."""\ndef f():\n    """Doc."""\ndef _g():\n    return 1\nclass A:\n    "Doc."\n    def h(self): ...\n'
    assert shape_violations(snippet(code)) == []


# --- dangers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from pickle import loads",
        "import marshal",
        "import shelve",
        "eval('1')",
        "exec(text)",
        "np.load(f, allow_pickle=True)",
        "np.load(f, allow_pickle=flag)",
        "torch.load(f)",
        "torch.load(f, weights_only=False)",
    ],
)
def test_unsafe_bites(code: str) -> None:
    assert unsafe_violations(snippet(code))


def test_unsafe_lets_pass() -> None:
    code = "import re\nre.compile('x')\nmodel.eval()\ntorch.load(f, weights_only=True)\nnp.load(f, allow_pickle=False)"
    assert unsafe_violations(snippet(code)) == []


@pytest.mark.parametrize(
    "handler",
    [
        "except Exception:\n    pass",
        "except:\n    pass",
        "except BaseException as error:\n    log(error)",
        "except (ValueError, Exception):\n    pass",
        "except Exception:  # noqa: BLE001\n    pass",
    ],
)
def test_blind_handlers_bite(handler: str) -> None:
    assert blind_violations(snippet(f"try:\n    f()\n{handler}"))


@pytest.mark.parametrize(
    "handler",
    [
        "except ValueError:\n    pass",
        "except BaseException:\n    undo()\n    raise",
        "except Exception as error:\n    raise Known from error",
        "except Exception as error:  # noqa: BLE001 - the task's top: its owner is told\n    tell(error)",
    ],
)
def test_blind_handlers_let_pass(handler: str) -> None:
    assert blind_violations(snippet(f"try:\n    f()\n{handler}")) == []


@pytest.mark.parametrize("line", ["x = 1  # noqa", "x = 1  # noqa: E501", "x = 1  # type: ignore"])
def test_noqa_bites(line: str) -> None:
    assert noqa_violations(snippet(line))


def test_noqa_lets_pass() -> None:
    code = "x = 1  # noqa: E501 - a table\ny = 2  # type: ignore[assignment]\ns = '# noqa'\n"
    assert noqa_violations(snippet(code)) == []


@pytest.mark.parametrize(
    "code",
    [
        "def test():\n    time.sleep(1)",
        "async def test():\n    await asyncio.sleep(0.05)",
        "def test():\n    while not done():\n        time.sleep(5)",
        "def test():\n    for _ in range(9):\n        time.sleep(0.01)",
    ],
)
def test_sleep_bites(code: str) -> None:
    assert sleep_violations(snippet(code, "tests/test_snippet.py"))


def test_sleep_lets_polling_and_yielding_pass() -> None:
    code = "async def f():\n    while not done():\n        await asyncio.sleep(0.01)\n    await asyncio.sleep(0)"
    assert sleep_violations(snippet(code, "tests/test_snippet.py")) == []


# --- the drawn tree ---------------------------------------------------------------------------------------------------


def test_a_drawn_tree_is_read_back() -> None:
    drawing = """Errors.

    Root                 the root
    ├── Branch           a branch
    │   ├── Leaf             a leaf
    │   └── Last             another
    └── Twig             no leaves
        └── Bud              not yet
    Other(ValueError)    its own root
    """
    expected = {"Root": "Exception", "Branch": "Root", "Leaf": "Branch", "Last": "Branch"}
    expected |= {"Twig": "Root", "Bud": "Twig", "Other": "ValueError"}
    assert drawn_tree(drawing) == expected


# --- circles ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "code",
    [
        "def f():\n    last = None\n    for _ in g():\n        try:\n            h()\n"
        "        except OSError as error:\n            last = error\n    raise last",
        "def f(silence):\n    try:\n        h()\n    except OSError as error:\n        raise silence from error",
        "def f():\n    try:\n        h()\n    except OSError as error:\n        found = error\n    tell(found)",
        "def f():\n    try:\n        h()\n    except OSError as error:\n        found.append(error)\n    tell(found)",
        "def f():\n    try:\n        h()\n    except OSError as error:\n        bug = Bug()\n"
        "        bug.__cause__ = error\n        tell(bug)",
        "async def f():\n    bug = Bug()\n    tell(bug)\n    raise bug",
        "@contextmanager\ndef f():\n    try:\n        yield\n    except E as error:\n        raise B() from error",
    ],
)
def test_circles_bite(code: str) -> None:
    assert circle_violations(snippet(code))


@pytest.mark.parametrize(
    "code",
    [
        "def f():\n    try:\n        h()\n    except OSError as error:\n        raise B() from error",
        "def f():\n    try:\n        h()\n    except OSError as error:\n        raise error",
        "def f(failure):\n    try:\n        raise failure\n    finally:\n        del failure",
        "def f():\n    raise StopIteration",
        "def f(self):\n    raise self.failure",
        "@scope\ndef f():\n    try:\n        yield\n    except OSError as error:\n        raise B() from error",
        "@contextmanager\ndef f():\n    try:\n        yield\n    except OSError:\n        g()\n        raise",
        "@contextmanager\ndef f():\n    try:\n        h()\n    except E as e:\n        raise B() from e\n    yield",
    ],
)
def test_circles_let_pass(code: str) -> None:
    assert circle_violations(snippet(code)) == []


# --- C ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("int x;\n", "no comment"),
        ("/* Long. */\n" + "int x;\n" * 900, "901 lines"),
        ("/* Wide. */\n" + " " * 121 + "\n", "121 columns"),
        ("/* A long one. */\nint f(void) {\n" + "    x();\n" * 70 + "}\n", "a function of 72 lines"),
    ],
)
def test_limits_for_c_bite(code: str, says: str) -> None:
    (found,) = c_violations("a.c", code)
    assert says in found


def test_limits_for_c_bear_with_short_functions() -> None:
    short = "int f(void) {\n" + "    x();\n" * 60 + "}\n"
    assert not c_violations("a.c", "/* Several. */\n" + short * 5)
