"""The lint of the project's prose: python docs/prose.py [FILE ...], part of ``./dev check``.

Two rules are checked. A docstring does not open with Of, What, Where, That, Which or Whether, since its first words are
a verb phrase or a noun phrase. Words of the project's former private dialect, and British spellings, do not appear in
pages, changelog fragments, examples, docstrings, comments, messages, schemas and the texts of the report. Each finding
names the file, the line, the word and the word to write.

No maintained linter does the same job. Ruff's pydocstyle rules (D401, D404) have fixed word lists. codespell reads
whole files, so it would flag identifiers as well, and its entries are single words without context. Vale could express
the second rule, but its package on PyPI downloads a binary when it first runs, which ``constraints.txt`` cannot pin.

Some words have a plain sense that a regular expression cannot distinguish from the former one: level, place, share as a
verb, agent, reference, odd, apart, has, meets. Reviewers look for these.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]

OPENINGS = re.compile(r"\s*(Of|What|Where|That|Which|Whether)\b")

# Words that are not written, and the words to write.
WORDS = {
    r"sittings?": "block, session block",
    r"epochs?": "revision",
    r"anchors?|anchored": "baseline center",
    r"spreads?|scatter(?:s|ed|ing)?": "variance, noise",
    r"loud(?:er|est|ly)?|quiet(?:er|est|ly)?": "noisy, stable",
    r"tells?|telling|told": "report, show, distinguish",
    r"weather": "noise regime",
    r"drawn\s+in": "winsorized",
    r"shares?\s+of": "fraction",
    r"slow\s+(?:one|rank)|waits?\s+(?:the\s+)?least": "straggler",
    r"red": "failed",
    r"green": "passed",
    r"sees|hears|knows": "a concrete verb: reads, receives, contains",
    r"grown": "increased",
    r"alike": "equal",
    r"cent(?:re[sd]?|ring)": "American spelling: center",
    r"(?:behavi|col|fav|neighb)our(?:s|ed|ing|ite)?": "American spelling: -or",
    r"(?:general|initial|minim|maxim|normal|optim|organ|quant|real|recogn|serial|special|summar|synchron|util)"
    r"is(?:e[drs]?|ers?|ing|ation)": "American spelling: -ize",
    r"analys(?:e[drs]?|ers|ing)": "American spelling: -yze",
}

# Phrases in which such a word has another, common sense.
ALLOWED = {
    r"reduce[- ]scatters?|scatters? (?:reads?|writes?|of (?:gradients|shards))": "a collective",
    r"spreads?(?: the ranks)? evenly over": "a distribution over nodes",
    r"--quiet": "an option of pip, git and sphinx",
    r"training epochs?|for epoch in": "passes over the training data",
    r"since the epoch|Unix epoch": "the origin of Unix time",
    r"--aorta-new-epoch": "the former option, in the error that names its successor",
}

_WORD = re.compile(
    "|".join(f"(?P<w{i}>(?<![\\w.])(?:{pattern})(?!\\w))" for i, pattern in enumerate(WORDS)), re.IGNORECASE
)
_HINTS = list(WORDS.values())
_ALLOWED = re.compile("|".join(ALLOWED), re.IGNORECASE)
# A name in backticks, and the target of a link, are not prose.
_CODE = re.compile(r"`[^`\s]+`|(?<=\])\([^)\s]*\)")
_QUOTED = re.compile(r'"([^"\n]*)"')
_YAML_PROSE = re.compile(r"(?:#|\bdescription:)(.*)")


class Finding(NamedTuple):
    """A word of one line, and the words to write in its place."""

    path: str
    line: int
    word: str
    hint: str

    def text(self) -> str:
        """Return the line to print, in the form that editors can follow."""
        return f"{self.path}:{self.line}: {self.word}: {self.hint}"


def words(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield the offset in lines, the word and the hint of each word in ``text`` that is not written."""
    text = _CODE.sub(lambda match: "x" * len(match[0]), text)
    text = _ALLOWED.sub(lambda match: "x" * len(match[0]), text)
    for match in _WORD.finditer(text):
        index = int(str(match.lastgroup)[1:])
        yield text.count("\n", 0, match.start()), " ".join(match[0].split()), _HINTS[index]


def _is_prose(quoted: str) -> bool:
    """Return whether a string literal has several words; a single word is a name, such as a key of JSON."""
    return bool(re.search(r"\s", quoted))


def in_text(path: str, text: str) -> Iterator[Finding]:
    """Yield the findings in a page."""
    for line, word, hint in words(text):
        yield Finding(path, line + 1, word, hint)


def in_data(path: str, text: str) -> Iterator[Finding]:
    """Yield the findings in the quoted sentences of JSON and JavaScript; a quoted single word is a name."""
    for number, line in enumerate(text.splitlines(), start=1):
        for quoted in filter(_is_prose, _QUOTED.findall(line)):
            for _, word, hint in words(quoted):
                yield Finding(path, number, word, hint)


def in_yaml(path: str, text: str) -> Iterator[Finding]:
    """Yield the findings in the comments and descriptions of a workload's YAML file."""
    for number, line in enumerate(text.splitlines(), start=1):
        if prose := _YAML_PROSE.search(line):
            for _, word, hint in words(prose[1]):
                yield Finding(path, number, word, hint)


def openings(path: str, source: str) -> Iterator[Finding]:
    """Yield the docstrings of Python source that open with a word of ``OPENINGS``."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        text = ast.get_docstring(node, clean=False) or ""
        if match := OPENINGS.match(text):
            line = node.body[0].lineno
            yield Finding(path, line, match[1], "open a docstring with a verb phrase or a noun phrase")


def in_python(path: str, source: str) -> Iterator[Finding]:
    """Yield the findings in docstrings, messages and comments; a string of a single word is a name."""
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and _is_prose(node.value):
            yield from _in_string(path, node, node.value, lines)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            for _, word, hint in words(token.string):
                yield Finding(path, token.start[0], word, hint)


def _in_string(path: str, node: ast.Constant, value: str, lines: list[str]) -> Iterator[Finding]:
    # Python 3.11 locates the parts of an f-string, and of joined literals, where the whole begins. So search the lines.
    first, last = node.lineno, node.end_lineno or node.lineno
    for _, word, hint in words(value):
        whole = re.compile(rf"(?<!\w){re.escape(word)}(?!\w)")
        line = next((number for number in range(first, last + 1) if whole.search(lines[number - 1])), first)
        first = line
        yield Finding(path, line, word, hint)


def check(path: Path, root: Path = ROOT) -> list[Finding]:
    """Return the findings in one file, sorted by line; which rules apply depends on its folder and suffix."""
    name, text = path.relative_to(root).as_posix(), path.read_text(encoding="utf-8")
    found: list[Finding] = []
    if path.suffix == ".py":
        found += openings(name, text)
        # Tests quote the messages of older versions, and this file lists the words.
        if name.startswith(("pytest_aorta/", "workloads/")):
            found += in_python(name, text)
    elif path.suffix in {".json", ".js"}:
        found += in_data(name, text)
    elif path.suffix == ".yaml":
        found += in_yaml(name, text)
    else:
        found += in_text(name, text)
    return sorted(set(found), key=lambda finding: finding.line)


def files(root: Path = ROOT) -> list[Path]:
    """Return every file that is checked."""
    patterns = ["*.md", "*.toml", "dev", "docs/*.md", "changelog.d/*.md", "examples/*/*", ".github/**/*.yml"]
    patterns += ["*.py", "docs/**/*.py", "docs/examples/**/*.yaml", "benchmarks/**/*.py", "tests/**/*.py"]
    for package in ("pytest_aorta", "workloads"):
        patterns += [f"{package}/**/*.{suffix}" for suffix in ("py", "json", "yaml", "jinja")]
    patterns.append("pytest_aorta/report/page/*.js")
    return sorted({path for pattern in patterns for path in root.glob(pattern)})


def main(arguments: list[str], root: Path = ROOT) -> int:
    """Print the findings in the given files, or in all files; return 1 if there are any."""
    found = [
        finding
        for path in [Path(argument).resolve() for argument in arguments] or files(root)
        for finding in check(path, root)
    ]
    for finding in found:
        print(finding.text())
    if found:
        print(f"{len(found)} findings; the words to write follow each word", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
