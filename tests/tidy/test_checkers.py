"""The checkers bite: each is given code that breaks its rule, and code that only looks as if it did."""

import pytest

from .circles import circle_violations
from .dangers import blind_violations, noqa_violations, sleep_violations, unsafe_violations
from .error_tree import drawn_tree
from .layers import circle_imports, layer_violations
from .purity import purity_violations
from .shape import c_violations, shape_violations
from .sources import snippet

SIM, TEST = "tests/sim/draw.py", "tests/test_snippet.py"
TRY = "def f():\n    try:\n        h()\n    except OSError as error:\n"
BITES = {
    purity_violations: [
        "from time import monotonic",
        "def f():\n    import secrets",
        "x = id(object())",
        "print('x')",
        "for x in {1, 2}:\n    pass",
        "names = {a for a in b}\nfirst = next(iter(names))",
        "def f(a, b):\n    return a.keys() & b.keys()",
        "def f():\n    seen = set()\n    return seen",
        "class A:\n    def __init__(self):\n        self.seen = set()",
    ],
    shape_violations: [
        "x = 1",
        '"""Doc."""\ndef f():\n    return 1',
        '"""Doc."""\n' + "x = 1\n" * 900,
        '"""Doc."""\nclass _A:\n    def f(self):\n' + "        x = 1\n" * 70,
    ],
    unsafe_violations: ["from pickle import loads", "exec(text)", "np.load(f, allow_pickle=flag)", "torch.load(f)"],
    blind_violations: [
        "try:\n    f()\nexcept:\n    pass",
        "try:\n    f()\nexcept (ValueError, Exception):\n    pass",
        "try:\n    f()\nexcept Exception:  # noqa: BLE001\n    pass",
    ],
    noqa_violations: ["x = 1  # noqa", "x = 1  # noqa: E501", "x = 1  # type: ignore"],
    circle_violations: [
        f"{TRY}        found = error\n    tell(found)",
        f"{TRY}        bug = Bug()\n        bug.__cause__ = error\n        tell(bug)",
        "def f(silence):\n    try:\n        h()\n    except OSError as error:\n        raise silence from error",
        "@contextmanager\ndef f():\n    try:\n        yield\n    except E as error:\n        raise B() from error",
    ],
}
LETS_PASS = {
    purity_violations: [
        "from math import inf\nfrom collections import deque\nimport msgspec",
        "x = sorted(set(a) - set(b))",
        "ok = set(a) <= set(b)",
        "x: dict[str, set[int]] = {}",
        "def f():\n    seen = set()\n    seen.add(1)\n    return 1 in seen and sorted(seen | {2})",
    ],
    shape_violations: ['"""Doc."""\ndef f():\n    """Doc."""\ndef _g():\n    return 1\nclass A:\n    "Doc."\n'],
    unsafe_violations: ["import re\nre.compile('x')\nmodel.eval()\ntorch.load(f, weights_only=True)"],
    blind_violations: [
        "try:\n    f()\nexcept BaseException:\n    undo()\n    raise",
        "try:\n    f()\nexcept Exception as error:\n    raise Known from error",
        "try:\n    f()\nexcept Exception as error:  # noqa: BLE001 - the task's top\n    tell(error)",
    ],
    noqa_violations: ["x = 1  # noqa: E501 - a table\ny = 2  # type: ignore[assignment]\ns = '# noqa'\n"],
    circle_violations: [
        f"{TRY}        raise B() from error",
        "def f(failure):\n    try:\n        raise failure\n    finally:\n        del failure",
        "@scope\ndef f():\n    try:\n        yield\n    except OSError as error:\n        raise B() from error",
    ],
}


@pytest.mark.parametrize("checker", BITES, ids=lambda checker: checker.__name__)
def test_a_checker_bites_and_lets_pass(checker) -> None:
    for code in BITES[checker]:
        assert list(checker(snippet(code))), code
    for code in LETS_PASS[checker]:
        assert list(checker(snippet(code))) == [], code


def test_layers() -> None:
    for path, code in [
        ("server/a.py", "from ..worker import state"),
        ("server/a.py", "from .. import runtime"),
        ("server/a.py", "def f():\n    import tensorhub.transport.tcp.transport"),
        ("server/a.py", "import numpy"),
        ("transport/tcp.py", "from ..memory.host import Piece"),
        ("runtime/server.py", "import torch"),
        ("integrations/vllm.py", "from ..runtime import client"),
        ("cli/main.py", "import requests"),
    ]:
        assert layer_violations(snippet(code, f"src/tensorhub/{path}")), code
    for path, code in [
        ("server/a.py", "import msgspec\nfrom ..protocol.names import Version\nfrom tensorhub.protocol import errors"),
        ("runtime/server.py", "import aiohttp\nfrom ..server.machine import Server\nfrom ..transport import tcp"),
        ("integrations/vllm.py", "import tensorhub\nfrom .. import open"),
    ]:
        assert layer_violations(snippet(code, f"src/tensorhub/{path}")) == [], code
    pair = [snippet(f"from .{b} import x", f"src/tensorhub/server/{a}.py") for a, b in ("ab", "ba")]
    assert "a → tensorhub.server.b → tensorhub.server.a" in circle_imports(pair)[0]
    assert circle_imports([pair[0], snippet("x = 1", "src/tensorhub/server/b.py")]) == []


def test_the_simulator_has_chance_only_from_its_seed() -> None:
    for code in [
        "import random\nx = random.random()",
        "from random import choice",
        "import random\nr = random.Random()",
    ]:
        assert purity_violations(snippet(code, SIM)), code
    assert purity_violations(snippet("from random import Random\nr = Random(7)\nx = r.random()", SIM)) == []
    code = "import time\nfrom concurrent.futures import ProcessPoolExecutor"
    assert purity_violations(snippet(code, "tests/sim/runner.py")) == []
    assert len(purity_violations(snippet(code, SIM))) == 2


def test_sleep() -> None:
    for code in ["def test():\n    time.sleep(1)", "def test():\n    while not done():\n        time.sleep(5)"]:
        assert sleep_violations(snippet(code, TEST)), code
    code = "async def f():\n    while not done():\n        await asyncio.sleep(0.01)\n    await asyncio.sleep(0)"
    assert sleep_violations(snippet(code, TEST)) == []


def test_a_drawn_tree_is_read_back() -> None:
    drawing = """Errors.

    Root                 the root
    ├── Branch           a branch
    │   └── Leaf             a leaf
    └── Twig             no leaves
    Other(ValueError)    its own root
    """
    expected = {"Root": "Exception", "Branch": "Root", "Leaf": "Branch", "Twig": "Root", "Other": "ValueError"}
    assert drawn_tree(drawing) == expected


def test_limits_for_c() -> None:
    for code, says in [
        ("int x;\n", "does not begin with a comment"),
        ("/* Long. */\n" + "int x;\n" * 900, "901 lines"),
        ("/* Wide. */\n" + " " * 121 + "\n", "121 columns"),
        ("/* A long one. */\nint f(void) {\n" + "    x();\n" * 70 + "}\n", "a function of 72 lines"),
    ]:
        (found,) = list(c_violations("a.c", code))
        assert says in found, says
    short = "int f(void) {\n" + "    x();\n" * 60 + "}\n"
    assert not list(c_violations("a.c", "/* Several. */\n" + short * 5))
