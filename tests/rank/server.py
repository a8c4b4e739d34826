"""Plugin of the process that runs checks of rank code: each request names one, each answer has its reports."""

from __future__ import annotations

import json
import socket
from collections import defaultdict
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--checks-fd", type=int, required=True, help="file descriptor of the socket to serve")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Server(config.getoption("checks_fd")))


class Server:
    """Collects a file when the first of its checks is asked for."""

    def __init__(self, fd: int) -> None:
        self.channel = socket.socket(fileno=fd)
        self.items: dict[str, dict[str, list[pytest.Item]]] = {}
        self.not_collected: dict[str, list[dict[str, str]]] = defaultdict(list)
        self.reports: list[dict[str, str]] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self) -> bool:
        """Collect nothing at the start."""
        return True

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Serve until the other end is closed."""
        with self.channel.makefile("rw") as channel:
            for line in channel:
                file, _, function = line.strip().partition("::")
                if file not in self.items:
                    self._collect(session, file)
                self.reports = [*self.not_collected[file]]
                for item in self.items[file].get(function, []):
                    item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
                channel.write(json.dumps(self.reports) + "\n")
                channel.flush()
        return True

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._add(report, "collect")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._add(report, report.when)

    def _collect(self, session: pytest.Session, file: str) -> None:
        self.reports = []
        self.items[file] = defaultdict(list)
        for item in session.perform_collect([str(FOLDER / f"{file}.py")]):
            assert isinstance(item, pytest.Function)
            self.items[file][item.originalname].append(item)
        self.not_collected[file] = [report for report in self.reports if report["outcome"] != "passed"]

    def _add(self, report: pytest.CollectReport | pytest.TestReport, when: str) -> None:
        if report.outcome == "skipped" and isinstance(report.longrepr, tuple):
            text = report.longrepr[2]
        else:
            sections = [f"--- {title} ---\n{content}" for title, content in report.sections]
            text = "\n".join([report.nodeid, report.longreprtext, *sections])
        self.reports.append({"outcome": report.outcome, "when": when, "text": text})
