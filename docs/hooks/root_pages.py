"""Shows files of the project's root as pages of the site."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

PAGES = {
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
}
LICENCE = "licence.md"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each of the files; links among them lead to the pages."""
    from mkdocs.structure.files import File

    root = Path(config.config_file_path).parent
    texts = {
        page: _relinked((root / file).read_text(encoding="utf-8"))
        for page, file in PAGES.items()
    }
    licence = (root / "LICENSE").read_text(encoding="utf-8")
    texts[LICENCE] = f"# Licence\n\n```text\n{licence}```\n"
    for page, text in texts.items():
        files.append(File.generated(config, page, content=text))
    return files


def _relinked(text: str) -> str:
    """Let links to files that are pages here lead to the pages."""
    targets = {file: page for page, file in PAGES.items()} | {"LICENSE": LICENCE}
    for file, page in targets.items():
        text = text.replace(f"]({file})", f"]({page})")
    return text
