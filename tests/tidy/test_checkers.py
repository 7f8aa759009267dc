"""The checkers bite: each is given code that breaks its rule, and code that only looks as if it did."""

from .circles import circle_violations
from .dangers import blind_violations, noqa_violations, sleep_violations, unsafe_violations
from .error_tree import drawn_tree
from .layers import circle_imports, layer_violations
from .purity import purity_violations
from .shape import c_violations, shape_violations
from .sources import snippet

# --- layers -----------------------------------------------------------------------------------------------------------


def test_layers_bite() -> None:
    for path, code in [
        ("server/a.py", "from tensorhub.runtime import server"),
        ("server/a.py", "from ..worker import state"),
        ("worker/a.py", "from tensorhub.server.groups import Replica"),
        ("server/a.py", "from ..runtime.server import Server"),
        ("server/a.py", "from .. import runtime"),
        ("server/a.py", "def f():\n    import tensorhub.transport.tcp.transport"),
        ("server/a.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ..memory import host"),
        ("server/a.py", "import numpy"),
        ("server/__init__.py", "from ..api import open"),
        ("transport/tcp.py", "from ..memory.host import Piece"),
        ("memory/streams.py", "from ..runtime import client"),
        ("memory/streams.py", "import aiohttp"),
        ("runtime/server.py", "import torch"),
        ("runtime/server.py", "from tensorhub import open"),
        ("integrations/vllm.py", "from ..runtime import client"),
        ("cli/main.py", "import requests"),
    ]:
        assert layer_violations(snippet(code, f"src/tensorhub/{path}")), code


def test_layers_let_pass() -> None:
    for path, code in [
        ("server/a.py", "import msgspec\nfrom ..protocol.names import Version\nfrom tensorhub.protocol import errors"),
        ("runtime/server.py", "import aiohttp\nfrom ..server.machine import Server\nfrom ..transport import tcp"),
        ("api.py", "from .runtime import client\nfrom .memory import registration"),
        ("cli/main.py", "import typer\nfrom .. import connect"),
        ("integrations/vllm.py", "import tensorhub\nfrom .. import open"),
    ]:
        assert layer_violations(snippet(code, f"src/tensorhub/{path}")) == [], code


def test_circles_in_the_core_are_found() -> None:
    pair = [
        snippet("from . import b", "src/tensorhub/server/a.py"),
        snippet("from .a import x", "src/tensorhub/server/b.py"),
    ]
    assert "a → tensorhub.server.b → tensorhub.server.a" in circle_imports(pair)[0]
    assert circle_imports([pair[0], snippet("x = 1", "src/tensorhub/server/b.py")]) == []


# --- purity -----------------------------------------------------------------------------------------------------------


def test_purity_bites() -> None:
    for code in [
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
    ]:
        assert purity_violations(snippet(code)), code


def test_purity_lets_pass() -> None:
    for code in [
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
    ]:
        assert purity_violations(snippet(code)) == [], code


SIM = "tests/sim/draw.py"


def test_simulator_has_chance_only_from_its_seed() -> None:
    for code in [
        "import random\nx = random.random()",
        "import random\nrandom.seed(1)",
        "from random import choice",
        "import random\nr = random.Random()",
        "import random\nr = random.SystemRandom()",
        "import time",
        "import multiprocessing",
    ]:
        assert purity_violations(snippet(code, SIM)), code


def test_simulator_may_draw_from_a_seed() -> None:
    code = "import random\nfrom random import Random\nr = random.Random(7)\ns = Random(seed)\nx = r.random()"
    assert purity_violations(snippet(code, SIM)) == []


def test_only_the_runner_may_use_processes() -> None:
    code = "import time\nfrom concurrent.futures import ProcessPoolExecutor"
    assert purity_violations(snippet(code, "tests/sim/runner.py")) == []
    assert len(purity_violations(snippet(code, SIM))) == 2


# --- shape ------------------------------------------------------------------------------------------------------------


def test_shape_bites() -> None:
    for code in [
        "x = 1",
        '"""Doc."""\ndef f():\n    return 1',
        '"""Doc."""\nclass A:\n    pass',
        '"""Doc."""\nasync def f():\n    return 1',
        '"""Doc."""\n' + "x = 1\n" * 900,
        '"""Doc."""\ndef _f():\n' + "    x = 1\n" * 70,
        '"""Doc."""\nclass _A:\n    def f(self):\n' + "        x = 1\n" * 70,
    ]:
        assert list(shape_violations(snippet(code))), code


def test_shape_lets_pass() -> None:
    code = '"""Doc."""\ndef f():\n    """Doc."""\ndef _g():\n    return 1\nclass A:\n    "Doc."\n    def h(self): ...\n'
    assert list(shape_violations(snippet(code))) == []


# --- dangers ----------------------------------------------------------------------------------------------------------


def test_unsafe_bites() -> None:
    for code in [
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
    ]:
        assert unsafe_violations(snippet(code)), code


def test_unsafe_lets_pass() -> None:
    code = "import re\nre.compile('x')\nmodel.eval()\ntorch.load(f, weights_only=True)\nnp.load(f, allow_pickle=False)"
    assert unsafe_violations(snippet(code)) == []


def test_blind_handlers_bite() -> None:
    for handler in [
        "except Exception:\n    pass",
        "except:\n    pass",
        "except BaseException as error:\n    log(error)",
        "except (ValueError, Exception):\n    pass",
        "except Exception:  # noqa: BLE001\n    pass",
    ]:
        assert blind_violations(snippet(f"try:\n    f()\n{handler}")), handler


def test_blind_handlers_let_pass() -> None:
    for handler in [
        "except ValueError:\n    pass",
        "except BaseException:\n    undo()\n    raise",
        "except Exception as error:\n    raise Known from error",
        "except Exception as error:  # noqa: BLE001 - the task's top: its owner is told\n    tell(error)",
    ]:
        assert blind_violations(snippet(f"try:\n    f()\n{handler}")) == [], handler


def test_noqa_bites() -> None:
    for line in ["x = 1  # noqa", "x = 1  # noqa: E501", "x = 1  # type: ignore"]:
        assert noqa_violations(snippet(line)), line


def test_noqa_lets_pass() -> None:
    code = "x = 1  # noqa: E501 - a table\ny = 2  # type: ignore[assignment]\ns = '# noqa'\n"
    assert noqa_violations(snippet(code)) == []


def test_sleep_bites() -> None:
    for code in [
        "def test():\n    time.sleep(1)",
        "async def test():\n    await asyncio.sleep(0.05)",
        "def test():\n    while not done():\n        time.sleep(5)",
        "def test():\n    for _ in range(9):\n        time.sleep(0.01)",
    ]:
        assert sleep_violations(snippet(code, "tests/test_snippet.py")), code


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


def test_circles_bite() -> None:
    for code in [
        "def f():\n    last = None\n    for _ in g():\n        try:\n            h()\n"
        "        except OSError as error:\n            last = error\n    raise last",
        "def f(silence):\n    try:\n        h()\n    except OSError as error:\n        raise silence from error",
        "def f():\n    try:\n        h()\n    except OSError as error:\n        found = error\n    tell(found)",
        "def f():\n    try:\n        h()\n    except OSError as error:\n        found.append(error)\n    tell(found)",
        "def f():\n    try:\n        h()\n    except OSError as error:\n        bug = Bug()\n"
        "        bug.__cause__ = error\n        tell(bug)",
        "async def f():\n    bug = Bug()\n    tell(bug)\n    raise bug",
        "@contextmanager\ndef f():\n    try:\n        yield\n    except E as error:\n        raise B() from error",
    ]:
        assert circle_violations(snippet(code)), code


def test_circles_let_pass() -> None:
    for code in [
        "def f():\n    try:\n        h()\n    except OSError as error:\n        raise B() from error",
        "def f():\n    try:\n        h()\n    except OSError as error:\n        raise error",
        "def f(failure):\n    try:\n        raise failure\n    finally:\n        del failure",
        "def f():\n    raise StopIteration",
        "def f(self):\n    raise self.failure",
        "@scope\ndef f():\n    try:\n        yield\n    except OSError as error:\n        raise B() from error",
        "@contextmanager\ndef f():\n    try:\n        yield\n    except OSError:\n        g()\n        raise",
        "@contextmanager\ndef f():\n    try:\n        h()\n    except E as e:\n        raise B() from e\n    yield",
    ]:
        assert circle_violations(snippet(code)) == [], code


# --- C ----------------------------------------------------------------------------------------------------------------


def test_limits_for_c_bite() -> None:
    for code, says in [
        ("int x;\n", "does not begin with a comment"),
        ("/* Long. */\n" + "int x;\n" * 900, "901 lines"),
        ("/* Wide. */\n" + " " * 121 + "\n", "121 columns"),
        ("/* A long one. */\nint f(void) {\n" + "    x();\n" * 70 + "}\n", "a function of 72 lines"),
    ]:
        (found,) = list(c_violations("a.c", code))
        assert says in found, says


def test_limits_for_c_bear_with_short_functions() -> None:
    short = "int f(void) {\n" + "    x();\n" * 60 + "}\n"
    assert not list(c_violations("a.c", "/* Several. */\n" + short * 5))
