"""The checkers bite: each is given code that breaks its rule once, and code that only looks as if it did."""

import pytest

from .circles import circle_violations
from .dangers import noqa_violations, sleep_violations, unsafe_violations
from .layers import circle_imports, layer_violations
from .purity import purity_violations
from .shape import shape_violations
from .sources import ROOT, snippet
from .test_docs import broken_links

TRY = "def f():\n    try:\n        h()\n    except OSError as error:\n"
BITES = {
    purity_violations: [
        "from time import monotonic",
        "import random\nr = random.Random()",
        "x = id(object())",
        "for x in {1, 2}:\n    pass",
        "names = {a for a in b}\nfirst = next(iter(names))",
        "def f(a, b):\n    return a.keys() & b.keys()",
    ],
    shape_violations: ["x = 1", '"""Doc."""\nclass _A:\n    def f(self):\n' + "        x = 1\n" * 70],
    unsafe_violations: ["from pickle import loads", "exec(text)", "np.load(f, allow_pickle=flag)", "torch.load(f)"],
    noqa_violations: ["x = 1  # noqa: E501"],
    sleep_violations: ["time.sleep(1)", "while not done():\n    time.sleep(5)"],
    layer_violations: ["from ..worker import state", "from .. import runtime", "import numpy"],
    circle_violations: [
        f"{TRY}        found = error\n    tell(found)",
        "def f(silence):\n    try:\n        h()\n    except OSError as error:\n        raise silence from error",
        "@contextmanager\ndef f():\n    try:\n        yield\n    except E as error:\n        raise B() from error",
    ],
}
LETS_PASS = {
    purity_violations: [
        "from math import inf\nx = sorted(set(a) - set(b))",
        "seen = set()\nseen.add(1)\ny = 1 in seen",
    ],
    shape_violations: ['"""Doc."""\ndef f():\n    """Doc."""\ndef _g():\n    return 1\n'],
    unsafe_violations: ["np.load(f, allow_pickle=False)", "torch.load(f, weights_only=True)"],
    noqa_violations: ["x = 1  # noqa: E501 - a table\ns = '# noqa'"],
    sleep_violations: ["while not done():\n    time.sleep(0.01)\nasyncio.sleep(0)"],
    layer_violations: ["import msgspec\nfrom ..protocol.names import Version\nfrom tensorhub.protocol import errors"],
    circle_violations: [
        f"{TRY}        raise B() from error",
        "def f(e):\n    try:\n        raise e\n    finally:\n        del e",
    ],
}


@pytest.mark.parametrize("checker", BITES, ids=lambda checker: checker.__name__)
def test_a_checker_bites_and_lets_pass(checker) -> None:
    for code in BITES[checker]:
        assert list(checker(snippet(code))), code
    for code in LETS_PASS[checker]:
        assert list(checker(snippet(code))) == [], code


def test_circles_of_imports_and_broken_links_are_found() -> None:
    pair = [snippet(f"from .{b} import x", f"src/tensorhub/server/{a}.py") for a, b in ("ab", "ba")]
    assert len(circle_imports(pair)) == 1
    assert circle_imports(pair[:1]) == []
    text = (
        "# One\n[a](nowhere.md) [b](#two) [c](README.md#no-such) [d](README.md) [e](https://example.org) `[f](code.md)`"
    )
    assert broken_links(ROOT / "CHANGELOG.md", text) == ["nowhere.md", "#two", "README.md#no-such"]
