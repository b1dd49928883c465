"""Makes a site of the pages as they lie in the repository, where their links work too.

The README is the start page. Links lead to where a page is on the site; in the navigation they may lead to a heading.
"""

import logging
import posixpath
import re
from collections.abc import Iterable
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Link, Navigation, Section
from mkdocs.structure.pages import Page

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
START = "index.md"
CODE_IN_TABLE = re.compile(r"(?<=`)[^`\n]*\\\|[^`\n]*(?=`)")
LINK = re.compile(r"(?<=\]\()([\w./-]+)(?=[)#])")
ADDED = {START: ROOT / "README.md", "site.css": HERE / "site.css", "mark.svg": HERE / "mark.svg"}
log = logging.getLogger("mkdocs.hooks.spreeze")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds what does not lie in ``assets/``."""
    for name, path in ADDED.items():
        files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_nav(nav: Navigation, config: MkDocsConfig, files: Files) -> Navigation:
    """Lets the navigation's links lead to headings."""
    for link in _links(nav.items):
        name, _, heading = link.url.partition("#")
        file = files.get_file_from_path(name)
        if file is None:
            log.warning("navigation: there is no page %s", link.url)
        else:
            link.url = f"{file.url}#{heading}"
    return nav


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turns links between files of the repository into links between pages, and a forge's Markdown into ours."""
    uri = page.file.src_uri
    folder = ROOT if uri == START else (ROOT / "assets" / uri).parent

    def on_site(match: re.Match[str]) -> str:
        target = (folder / match[1]).resolve()
        if target == ROOT / "README.md":
            name = START
        elif target.is_file() and target.is_relative_to(ROOT / "assets"):
            name = target.relative_to(ROOT / "assets").as_posix()
        else:
            return match[0]
        return posixpath.relpath(name, posixpath.dirname(uri))

    # A forge wants a bar in the code of a table escaped; here the table keeps it, and the backslash would be shown.
    return CODE_IN_TABLE.sub(lambda match: match[0].replace(r"\|", "|"), LINK.sub(on_site, markdown))


def _links(items: Iterable[object]) -> Iterable[Link]:
    for item in items:
        if isinstance(item, Link):
            yield item
        elif isinstance(item, Section):
            yield from _links(item.children)
