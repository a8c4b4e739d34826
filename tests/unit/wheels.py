"""Wheels of packages that tests install: a module with the version, and requirements."""

import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path


def make_wheel(
    folder: Path,
    name: str,
    version: str,
    text: str = "",
    requires: Sequence[str] = (),
    path: str = "",
    more: Mapping[str, str | None] = {},
) -> Path:
    """Write the wheel of a package whose module is its version and ``text``, with an entry of the search path.

    Of the files in ``more``, those with None are left out.
    """
    info = f"{name}-{version}.dist-info"
    needs = "".join(f"Requires-Dist: {one}\n" for one in requires)
    files = {
        f"{name}.py": f"VERSION = {version!r}\n{text}",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    if path:
        files[f"{name}.pth"] = path
    given = files | {file.format(info=info): content for file, content in more.items()}
    files = {file: content for file, content in given.items() if content is not None}
    record = "".join(f"{file},,\n" for file in (*files, f"{info}/RECORD"))
    folder.mkdir(parents=True, exist_ok=True)
    made = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(made, "w") as wheel:
        for file, content in {**files, f"{info}/RECORD": record}.items():
            wheel.writestr(file, content)
    return made
