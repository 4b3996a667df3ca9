"""Writes the reference of the `geutil` command from the command itself."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.pages import Page

PAGE = "reference/commands.md"
MARK = "<!-- commands -->"


def on_page_markdown(
    markdown: str, *, page: Page, config: MkDocsConfig, **_: Any
) -> str:
    """Put the commands in the place of a mark on their page."""
    if page.file.src_uri != PAGE:
        return markdown
    if MARK not in markdown:
        raise ValueError(f"{PAGE} has no '{MARK}'")
    return markdown.replace(MARK, "\n".join(reference()))


def reference() -> Iterator[str]:
    """Yield the lines of the reference, command by command."""
    import typer

    from geutil.cli.commands import app

    group: Any = typer.main.get_command(app)
    for name, command in group.commands.items():
        yield from _section(name, command)


def _section(name: str, command: Any) -> Iterator[str]:
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [
        p for p in command.params if p.param_type_name == "option" and not p.hidden
    ]
    words = [_placeholder(p) for p in arguments]
    words += [f"{p.opts[0]} {_value(p)}" for p in options if p.required]
    rest = " [OPTIONS]" if any(not p.required for p in options) else ""
    yield from (f"## geutil {name}", "", " ".join(command.help.split()), "")
    yield from ("```text", f"geutil {name} {' '.join(words)}{rest}", "```", "")
    yield from ("| argument | meaning |", "|---|---|")
    for parameter in (*arguments, *options):
        said = " ".join((_help(parameter), *_notes(parameter)))
        yield f"| {_spelled(parameter)} | {said.strip()} |"
    yield ""


def _spelled(parameter: Any) -> str:
    """Return how a parameter is written."""
    if parameter.param_type_name == "argument":
        return f"`{_placeholder(parameter)}`"
    value = "" if parameter.is_flag else f" {_value(parameter)}"
    return ", ".join(f"`{option}{value}`" for option in parameter.opts)


def _placeholder(parameter: Any) -> str:
    return str(parameter.metavar or parameter.name.upper())


def _value(parameter: Any) -> str:
    """Return what stands for the value of an option."""
    kind = parameter.type_descriptor.annotation
    if isinstance(kind, type) and issubclass(kind, Enum):
        return parameter.name.upper() if parameter.name != "form" else "FORMAT"
    names = {int: "INTEGER", float: "NUMBER", "Path": "PATH"}
    named = names.get(kind) or names.get(getattr(kind, "__name__", ""))
    return named or "TEXT"


def _help(parameter: Any) -> str:
    return (parameter.help or "").replace("|", "\\|")


def _notes(parameter: Any) -> Iterator[str]:
    """Yield what there is to say of a parameter's values."""
    kind = parameter.type_descriptor.annotation
    if isinstance(kind, type) and issubclass(kind, Enum):
        yield f"One of {', '.join(f'`{choice.value}`' for choice in kind)}."
    if parameter.min is not None or parameter.max is not None:
        low, high = parameter.min, parameter.max
        yield f"{low} to {high}." if high is not None else f"At least {low}."
    if parameter.required:
        yield "Required." if parameter.param_type_name == "option" else ""
    elif parameter.default is not None and not parameter.is_flag:
        default = getattr(parameter.default, "value", parameter.default)
        yield f"By default `{default}`."
    if parameter.multiple:
        yield "Several times, if need be."
