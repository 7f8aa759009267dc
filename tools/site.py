"""What MkDocs does besides reading docs/: pages of the root join the site, and so do files that pages link to.

The README is the site's first page. Links stay right: `docs/x.md` of the root and `../x` of docs/ are `x` here.
"""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
ROOT_PAGES = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md")
MOVED = {"../README.md": "index.md", "docs/README.md": "pages.md"}  # both are called README.md
LINK = re.compile(r"(?<=\]\()(<?)([^)\s>#]+)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the root's pages, and each file outside of docs/ that a page links to."""
    index = files.get_file_from_path("README.md")
    assert index is not None
    files.remove(index)
    files.append(File.generated(config, "pages.md", content=_moved(index.content_string)))
    for name in ROOT_PAGES:
        text = _moved((ROOT / name).read_text(encoding="utf-8"))
        files.append(File.generated(config, "index.md" if name == "README.md" else name, content=text))
    pages = [file for file in files if file.is_documentation_page()]
    for link in sorted({link for page in pages for _, link in LINK.findall(_moved(page.content_string))}):
        if (ROOT / link).is_file() and files.get_file_from_path(link) is None:
            files.append(File.generated(config, link, content=(ROOT / link).read_bytes()))
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    """A page of docs/ with its links as they are here."""
    return _moved(markdown)


def _moved(text: str) -> str:
    """The text with links that lead from docs/ to the root, or back, as links inside the site."""
    return LINK.sub(lambda found: found[1] + _target(found[2]), text)


def _target(link: str) -> str:
    if link in MOVED:
        return MOVED[link]
    for prefix in ("docs/", "../"):
        inside = link.removeprefix(prefix)
        if inside != link and (ROOT / inside if prefix == "../" else ROOT / link).exists():
            return inside
    return link
