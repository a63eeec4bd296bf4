"""A hook of mkdocs that rewrites links from ``docs`` to other folders of the repository.

On the site, ``../../deploy/base`` would lead nowhere. If ``REPOSITORY`` is set, such a link leads
to the file in the repository; otherwise only its text remains. A link to a file that does not exist
stays as it is, so that mkdocs reports it.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

_LINK = re.compile(r"(?<!!)\[(?P<text>[^\]]*)\]\((?P<target>\.\./[^)\s#]+)(?P<anchor>#[^)\s]*)?\)")


def on_page_markdown(markdown: str, /, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return the page with its links out of ``docs`` replaced."""
    repository = Path(config.config_file_path).parent
    folder = posixpath.join("docs", posixpath.dirname(page.file.src_uri))

    def replaced(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, link["target"]))
        if target.startswith("docs/") or not (repository / target).exists():
            return link[0]
        if not config.repo_url:
            return link["text"]
        kind = "tree" if (repository / target).is_dir() else "blob"
        url = f"{config.repo_url.rstrip('/')}/{kind}/main/{target}"
        return f"[{link['text']}]({url}{link['anchor'] or ''})"

    return _LINK.sub(replaced, markdown)
