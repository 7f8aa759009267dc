"""The documentation: its links lead somewhere, its code runs, its tables are what the code says."""

import inspect
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import pytest

import tensorhub
import tensorhub.aio

from .sources import ROOT

PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")])
LINK = re.compile(r"!?\[[^\]]*\]\(<?([^)>\s]+)>?(?:\s+\"[^\"]*\")?\)")
FENCE = re.compile(r"^(```+|~~~+)(\w*)[^\n]*\n(.*?)^\1\s*$", re.MULTILINE | re.DOTALL)

in_pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())


def prose_of(text: str) -> str:
    """The text without its code."""
    return re.sub(r"`[^`\n]*`", "", FENCE.sub("", text))


def anchors_of(page: Path) -> set[str]:
    """What `#…` may name on that page, as the usual hosts make them from headings."""
    headings = re.findall(r"^#+\s+(.*?)\s*#*$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower().replace("`", "")) for heading in headings)
    return {text.replace(" ", "-") for text in plain}


def broken_links(page: Path, text: str) -> list[str]:
    """Links to files or headings that do not exist. Links to other hosts are not followed."""
    broken = []
    for link in LINK.findall(prose_of(text)):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = unquote(link).partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors_of(target)):
            broken.append(link)
    return broken


def python_blocks(text: str) -> list[str]:
    """The ```python blocks of a page, in order."""
    return [code for _, language, code in FENCE.findall(text) if language == "python"]


@in_pages
def test_links_lead_somewhere(page: Path) -> None:
    assert broken_links(page, page.read_text(encoding="utf-8")) == []


def test_every_page_is_in_the_index() -> None:
    index = ROOT / "docs/README.md"
    listed = {(index.parent / link.partition("#")[0]).resolve() for link in LINK.findall(index.read_text())}
    pages = {page.resolve() for page in ROOT.glob("docs/*.md")} - {index.resolve()}
    assert sorted(str(page.relative_to(ROOT)) for page in pages - listed) == []
    site = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert [page.name for page in sorted(pages) if f"- {page.name}\n" not in site] == []


@in_pages
def test_pages_name_nothing_outside_the_project(page: Path) -> None:
    found = re.findall(r"(?<![\w.])/(?:work|root|home|tmp/[a-z])[\w/.-]*", prose_of(page.read_text(encoding="utf-8")))
    assert found == []


README_CODE = python_blocks((ROOT / "README.md").read_text(encoding="utf-8"))


@pytest.mark.skipif(not README_CODE, reason="README.md has no ```python block yet")
@pytest.mark.processes
def test_readme_code_runs(tmp_path: Path) -> None:
    """All blocks together, as a reader would type them, from the first to the last."""
    program = tmp_path / "readme.py"
    program.write_text("\n".join(README_CODE), encoding="utf-8")
    command = [sys.executable, str(program)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr


def test_generated_tables_are_current() -> None:
    command = [sys.executable, str(ROOT / "tools/gen_docs.py"), "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def public_names() -> list[tuple[str, object]]:
    """What users may import or call: `open`, `Weights.update`, `aio.Weights.update`, with what they are."""
    names = [(name, getattr(tensorhub, name)) for name in tensorhub.__all__ if name not in ("aio", "errors")]
    names += [(f"aio.{name}", getattr(tensorhub.aio, name)) for name in ("open", "connect", "Weights", "View")]
    for name, found in list(names):
        if isinstance(found, type) and not issubclass(found, BaseException):
            annotated = getattr(found, "__annotations__", {})
            members = (part for part in [*vars(found)] if not part.startswith("_") and part not in annotated)
            names += [(f"{name}.{part}", inspect.getattr_static(found, part)) for part in members]
    return names


def undocumented(names: list[tuple[str, object]], code: str) -> list[str]:
    """Those without a docstring, and those whose last word stands in no code of the pages."""
    words = set(re.findall(r"\w+", code))
    return [name for name, found in names if not getattr(found, "__doc__", "") or name.split(".")[-1] not in words]


def test_every_public_name_is_documented() -> None:
    pages = [page.read_text(encoding="utf-8") for page in PAGES if "decisions" not in page.parts]
    spans = (FENCE.sub("", text) for text in pages)
    code = "\n".join(
        [*(block[2] for text in pages for block in FENCE.findall(text)), *re.findall(r"`[^`\n]+`", "\n".join(spans))]
    )
    assert undocumented(public_names(), code) == []
    assert undocumented([("nothing_of_that_name", len)], code) == ["nothing_of_that_name"]
