"""Every file of the product and of the tests keeps the house rules."""

from pathlib import Path

import pytest

from .c_shape import c_files, c_violations
from .circles import circle_violations
from .core_order import ROWS, order_violations, ownership_violations
from .dangers import (
    ALLOWED_SLEEPS,
    blind_violations,
    noqa_violations,
    sleep_violations,
    unsafe_violations,
)
from .eager import lazy_violations
from .layers import BELOW, layer_violations
from .pure_rules import rule_violations
from .purity import is_pure_territory, purity_violations
from .shape import shape_violations
from .sources import ROOT, Source, functions_of, sources

SRC = sources("src")
TESTS = sources("tests")

in_src = pytest.mark.parametrize("source", SRC, ids=lambda source: source.path)
in_tests = pytest.mark.parametrize("source", TESTS, ids=lambda source: source.path)


def none_of(violations: list[str]) -> None:
    """Fail with one line for each violation."""
    if violations:
        pytest.fail("\n".join(violations), pytrace=False)


@in_src
def test_imports_run_one_way(source: Source) -> None:
    none_of(layer_violations(source))


@pytest.mark.parametrize("source", sources("src/tensorhub/core"), ids=lambda source: source.path)
def test_the_core_runs_one_way_inside(source: Source) -> None:
    none_of(order_violations(source) + ownership_violations(source) + rule_violations(source) + lazy_violations(source))


@pytest.mark.parametrize("package", ROWS)
def test_every_file_has_its_place_in_the_row(package: str) -> None:
    inside = [source.module for source in SRC if source.module.startswith(f"{package}.")]
    others = [other for other in ROWS if other.startswith(f"{package}.")]
    mine = [module for module in inside if not any(f"{module}.".startswith(f"{other}.") for other in others)]
    assert sorted(module.removeprefix(f"{package}.") for module in mine) == sorted(ROWS[package])


@pytest.mark.parametrize("source", [s for s in SRC if is_pure_territory(s)], ids=lambda source: source.path)
def test_core_and_simulator_are_pure(source: Source) -> None:
    none_of(purity_violations(source))


@in_src
def test_files_and_functions_are_short_and_say_what_they_are(source: Source) -> None:
    none_of(shape_violations(source))


@pytest.mark.parametrize("path", c_files(), ids=lambda path: path.name)
def test_c_files_are_short_and_say_what_they_are(path: Path) -> None:
    none_of(c_violations(path.name, path.read_text(encoding="utf-8")))


@in_src
def test_nothing_runs_what_it_reads(source: Source) -> None:
    none_of(unsafe_violations(source))


@in_src
def test_nothing_hides_what_went_wrong(source: Source) -> None:
    none_of(blind_violations(source) + noqa_violations(source))


@in_src
def test_no_frame_keeps_an_error_of_its_own(source: Source) -> None:
    none_of(circle_violations(source))


@in_tests
def test_tests_wait_for_conditions(source: Source) -> None:
    none_of(sleep_violations(source) + noqa_violations(source))


def test_every_allowed_sleep_still_exists() -> None:
    known = {f"{source.path}::{function.name}" for source in TESTS for function in functions_of(source)}
    assert sorted(set(ALLOWED_SLEEPS) - known) == []
    assert all(ALLOWED_SLEEPS.values()), "each needs its reason"


def test_every_folder_is_a_known_layer() -> None:
    folders = {path.parent.name for path in (ROOT / "src/tensorhub").glob("*/__init__.py")}
    assert sorted(folders - set(BELOW)) == []
