"""Every file of the product and of the tests keeps the house rules. One test for each rule."""

from collections.abc import Callable, Iterable, Sequence

import pytest

from .circles import circle_violations
from .dangers import noqa_violations, sleep_violations, unsafe_violations
from .layers import BELOW, circle_imports, layer_violations
from .purity import is_pure, purity_violations
from .shape import c_files, c_violations, shape_violations
from .sources import ROOT, Source, sources

pytestmark = pytest.mark.xdist_group("house")  # one process parses the sources, once


def pure() -> list[Source]:
    """What must be pure: core and simulator."""
    return [source for folder in ("src", "tests/sim") for source in sources(folder) if is_pure(source)]


def none_of(violations: Iterable[str]) -> None:
    """Fail with one line for each violation."""
    if found := list(violations):
        pytest.fail("\n".join(found), pytrace=False)


def none_in(files: Sequence[Source], *rules: Callable[[Source], Iterable[str]]) -> None:
    """The same for each rule and file."""
    none_of(violation for source in files for rule in rules for violation in rule(source))


def test_imports_run_one_way() -> None:
    none_in(sources("src"), layer_violations)
    none_in(pure(), layer_violations)


def test_imports_of_the_machines_run_in_no_circle() -> None:
    none_of(circle_imports([source for source in sources("src") if is_pure(source)]))


def test_core_and_simulator_are_pure() -> None:
    none_in(pure(), purity_violations)


def test_files_and_functions_are_short_and_documented() -> None:
    none_in(sources("src"), shape_violations)


def test_c_files_and_functions_are_short_and_documented() -> None:
    none_of(found for path in c_files() for found in c_violations(path.name, path.read_text(encoding="utf-8")))


def test_received_bytes_are_never_run() -> None:
    none_in(sources("src"), unsafe_violations)


def test_no_rule_is_silenced_without_a_reason() -> None:
    none_in(sources("src"), noqa_violations)


def test_no_frame_keeps_its_own_error() -> None:
    none_in(sources("src"), circle_violations)


def test_tests_wait_for_conditions() -> None:
    none_in(sources("tests"), sleep_violations)


def test_every_folder_is_a_known_layer() -> None:
    folders = {path.parent.name for path in (ROOT / "src/tensorhub").glob("*/__init__.py")}
    assert sorted(folders - set(BELOW)) == []
