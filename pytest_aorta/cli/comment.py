"""``aorta comment``: the findings of a job that is not trusted, checked and rendered as Markdown for a comment."""

import argparse
from pathlib import Path

from pytest_aorta.cli import ExitCode
from pytest_aorta.common.errors import AortaError
from pytest_aorta.common.files import UnreadableFile, raised_as, write_text
from pytest_aorta.common.model import read_model
from pytest_aorta.common.text import brief, emit
from pytest_aorta.plan.options import file_ending_in
from pytest_aorta.report.markdown import MAX_COMMENT_BYTES, Findings, escaped, markdown

_MAX_FILE_BYTES = 4 << 20
_NOTICE = "Reported by a job that runs the code under review; nothing but the end of this job was checked.\n\n"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the subcommand."""
    parser.add_argument(
        "findings", metavar="FILE", type=Path, help="the .findings.json beside the file of --aorta-markdown"
    )
    parser.add_argument("--commit", required=True, help="full hash of the commit that the job tested")
    parser.add_argument("--conclusion", required=True, help="how the job ended, as CI says: success, or anything else")
    parser.add_argument("--link", default="", help="address of the job, which the comment links")
    parser.add_argument("-o", "--output", type=file_ending_in(".md"), required=True, help="file to write")


def run(arguments: argparse.Namespace) -> int:
    """Write the comment; findings that can't be used are a comment that says why."""
    conclusion = "success" if arguments.conclusion == "success" else escaped(brief(arguments.conclusion, 40))
    try:
        found = read_model(arguments.findings, Findings, max_bytes=_MAX_FILE_BYTES, follow_links=False)
        if found.commit != arguments.commit:
            of = f"commit {found.commit}" if found.commit else "no known commit"
            raise UnreadableFile(f"they are of {of}, and the job tested {arguments.commit}")
        text = markdown(found, max_bytes=MAX_COMMENT_BYTES, conclusion=conclusion, notice=_NOTICE)
    except UnreadableFile as error:
        reason = escaped(brief(str(error).replace(str(arguments.findings), arguments.findings.name), 500))
        text = f"## \N{CROSS MARK} pytest-aorta: the job ended with {conclusion}, without usable findings\n\n{reason}\n"
    if arguments.link:
        text += f"\n[Report, results and logs]({arguments.link})\n"
    with raised_as(AortaError, f"{arguments.output}: not written: "):
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        write_text(arguments.output, text)
    emit([str(arguments.output)])
    return ExitCode.OK
