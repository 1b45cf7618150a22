"""A page read back: its elements, its text, and the data of its scripts."""

import json
from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Any

VOID = ("meta", "link", "br", "path", "rect", "hr")


@dataclass
class Page:
    tags: list[tuple[str, dict[str, str | None]]] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    scripts: list[str] = field(default_factory=list)
    open: list[str] = field(default_factory=list)

    @property
    def names(self) -> set[str]:
        return {name for name, _ in self.tags}

    @property
    def words(self) -> str:
        return " ".join(" ".join(self.text).split())

    @property
    def data(self) -> Any:
        return json.loads(self.scripts[0])


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.page = Page()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.page.tags.append((tag, dict(attrs)))
        if tag == "script":
            self.page.scripts.append("")
        if tag not in VOID:
            self.page.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.page.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.page.open and self.page.open[-1] == tag, (tag, self.page.open)
            self.page.open.pop()

    def handle_data(self, data: str) -> None:
        inside = self.page.open[-1] if self.page.open else ""
        if inside == "script":
            self.page.scripts[-1] += data
        elif inside != "style":
            self.page.text.append(data)


def parsed(html: str) -> Page:
    """The page; elements must be closed in order."""
    reader = _Reader()
    reader.feed(html)
    reader.close()
    assert not reader.page.open, reader.page.open
    return reader.page
