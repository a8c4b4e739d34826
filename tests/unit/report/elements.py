"""The elements of a page of HTML."""

from collections import defaultdict
from html.parser import HTMLParser

VOID = ("br", "hr", "meta", "link", "input", "wbr", "img")


class Elements(HTMLParser):
    """The tags of a page, the text in each kind of element, targets of links, and tags that do not match."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.texts: defaultdict[str, list[str]] = defaultdict(list)
        self.targets: list[str | None] = []
        self.wrong: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.texts[tag].append("")
        self.targets += [value for name, value in attrs if name in ("src", "href", "action", "srcset")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)

    def handle_data(self, data: str) -> None:
        for tag in self.open:
            self.texts[tag][-1] += data

    def handle_comment(self, data: str) -> None:
        self.wrong.append(data)
