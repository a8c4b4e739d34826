"""``aorta comment`` against a server that behaves as the APIs of GitHub and GitLab do."""

from __future__ import annotations

import argparse
import email.utils
import json
import os
import subprocess
import sys
import threading
import time
from functools import partial

import pytest

from pytest_aorta.cli import main as cli
from pytest_aorta.cli.report import client
from pytest_aorta.cli.report.comment import marker_of, write_comment
from pytest_aorta.cli.report.hosts import Comment, GitHub
from pytest_aorta.cli.report.pull_request import find_host
from tests.integration.code_host import (
    ACTIONS,
    APP,
    JOB,
    NUMBER,
    PERSON,
    PROJECT,
    PROJECT_ID,
    READ_ONLY,
    REPOSITORY,
    Fault,
    serving,
)

TEXT = "## \N{CROSS MARK} pytest-aorta: 1 of 2 tests failed\n"
MARKER = marker_of("aorta")
BOT = "github-actions[bot]"
SERVICES = ("github", "gitlab")
# Limit of one request, within which the server answers on busy cores too.
LIMIT_S = 2.0
UPDATE = {"github": "PATCH", "gitlab": "PUT"}


@pytest.fixture
def server():
    with serving() as host:
        yield host


class Job:
    """A job of CI: its environment, the file, and the command."""

    def __init__(self, server, folder, monkeypatch, capsys) -> None:
        self.server, self.folder, self.monkeypatch, self.capsys = server, folder, monkeypatch, capsys
        self.slept: list[float] = []
        monkeypatch.setattr(client.Client, "sleep", lambda _, seconds: self.slept.append(seconds))
        for name in ("GITHUB_ACTIONS", "GITLAB_CI", "GITHUB_TOKEN", "GH_TOKEN", "GITLAB_TOKEN", "CI_JOB_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("NO_PROXY", "*")
        self.write(TEXT)

    def write(self, text: str) -> None:
        (self.folder / "aorta.md").write_text(text, encoding="utf-8")

    def event(self, name: str, document: object) -> None:
        file = self.folder / "event.json"
        file.write_text(document if isinstance(document, str) else json.dumps(document))
        self.set(GITHUB_EVENT_NAME=name, GITHUB_EVENT_PATH=str(file))

    def set(self, **variables: str) -> None:
        for name, value in variables.items():
            self.monkeypatch.setenv(name, value)

    def on(self, service: str, token: str | None = None):
        if service == "github":
            self.set(GITHUB_ACTIONS="true", GITHUB_TOKEN=token or ACTIONS, GITHUB_API_URL=self.server.url)
            self.set(GITHUB_REPOSITORY=REPOSITORY)
            self.event("pull_request", {"pull_request": {"number": NUMBER}})
        else:
            self.set(GITLAB_CI="true", GITLAB_TOKEN=token or PROJECT, CI_API_V4_URL=f"{self.server.url}/api/v4")
            self.set(CI_PROJECT_ID="99", CI_MERGE_REQUEST_PROJECT_ID=str(PROJECT_ID), CI_MERGE_REQUEST_IID=str(NUMBER))
            self.set(CI_MERGE_REQUEST_PROJECT_URL="https://lab.test/octo/repo")
        return self

    def run(self, *arguments: str) -> tuple[int, str, str]:
        code = cli.main(["comment", str(self.folder / "aorta.md"), *arguments])
        captured = self.capsys.readouterr()
        for name in (ACTIONS, READ_ONLY, PERSON, APP, PROJECT, JOB):
            assert name not in captured.out + captured.err, "a token was printed"
        return code, captured.out, captured.err


@pytest.fixture
def job(server, tmp_path, monkeypatch, capsys):
    return Job(server, tmp_path, monkeypatch, capsys)


@pytest.mark.parametrize("service", SERVICES)
def test_first_run_creates_the_comment_and_the_next_one_updates_it(job, server, service):
    code, out, _ = job.on(service).run("--link", "HTML report=https://ci.test/1")
    assert (code, out.split(":")[0]) == (0, "created")
    assert server.bodies() == [f"{MARKER}\n{TEXT}\n[HTML report](<https://ci.test/1>)\n"]
    job.write("## all passed\n")
    code, out, _ = job.run()
    assert (code, out.split(":")[0]) == (0, "updated")
    assert server.bodies() == [f"{MARKER}\n## all passed\n"]


def test_address_of_the_comment_is_printed(job):
    assert job.on("github").run()[1].endswith(f"/{REPOSITORY}/pull/{NUMBER}#issuecomment-101\n")


def test_address_of_a_note_is_printed(job):
    assert job.on("gitlab").run()[1] == f"created: https://lab.test/octo/repo/-/merge_requests/{NUMBER}#note_101\n"


@pytest.mark.parametrize("service", SERVICES)
def test_jobs_with_two_keys_have_two_comments(job, server, service):
    job.on(service)
    for key in ("cpu", "gpu", "cpu", "gpu"):
        job.run("--key", key)
    assert [body.splitlines()[0] for body in server.bodies()] == [marker_of("cpu"), marker_of("gpu")]


@pytest.mark.parametrize("service", SERVICES)
def test_comment_on_a_later_page_is_found(job, server, service):
    for number in range(25):
        server.add(f"comment {number}", "somebody")
    server.page_size = 10
    job.on(service).run()
    assert job.run()[1].startswith("updated")
    assert len(server.comments) == 26


def test_comment_of_another_user_with_the_marker_is_left_alone(job, server):
    server.add(f"{MARKER}\nfake", "mallory")
    server.add(f"> {MARKER}\nquoted", BOT)
    job.on("github").run()
    job.run()
    assert server.bodies() == [f"{MARKER}\nfake", f"> {MARKER}\nquoted", f"{MARKER}\n{TEXT}"]


def test_token_of_a_person_updates_the_comment_of_that_person(job, server):
    server.add(f"{MARKER}\nold", BOT)
    job.on("github", PERSON).run()
    assert job.run()[1].startswith("updated")
    assert [comment["user"]["login"] for comment in server.comments] == [BOT, "person"]


def test_token_of_an_unknown_app_leaves_one_comment_too(job, server):
    for _ in range(3):
        assert job.on("github", APP).run()[0] == 0
    assert [comment["id"] for comment in server.comments] == [101]
    assert job.run("--author", "other-app[bot]")[1].startswith("updated")
    assert server.counted("DELETE") == 2


@pytest.mark.parametrize("service", SERVICES)
def test_later_duplicates_are_deleted(job, server, service):
    author = BOT if service == "github" else "project_7_bot"
    for number in range(3):
        server.add(f"{MARKER}\n{number}", author)
    job.on(service).run()
    assert [(comment["id"], comment["body"]) for comment in server.comments] == [(101, f"{MARKER}\n{TEXT}")]


@pytest.mark.parametrize("service", SERVICES)
def test_run_that_created_the_later_of_two_comments_at_once_leaves_the_older_one_with_its_text(job, server, service):
    author = BOT if service == "github" else "project_7_bot"
    server.hooks["POST"] = partial(server.add, f"{MARKER}\nother run", author)
    code, out, _ = job.on(service).run()
    assert (code, out.split(":")[0]) == (0, "updated")
    assert [(comment["id"], comment["body"]) for comment in server.comments] == [(101, f"{MARKER}\n{TEXT}")]


@pytest.mark.parametrize("service", SERVICES)
def test_run_that_created_the_older_of_two_comments_deletes_the_later_one(job, server, service):
    author = BOT if service == "github" else "project_7_bot"
    another = partial(server.add, f"{MARKER}\nother run", author)
    server.hooks["POST"] = lambda: server.hooks.update(GET=another)
    code, out, _ = job.on(service).run()
    assert (code, out.split(":")[0]) == (0, "created")
    assert [(comment["id"], comment["body"]) for comment in server.comments] == [(101, f"{MARKER}\n{TEXT}")]


def test_runs_at_once_leave_one_comment(job, server, monkeypatch):
    job.on("github")
    runs, texts = range(6), [f"## run {number}\n" for number in range(6)]
    none_found, met = threading.Barrier(len(runs)), set()
    create = GitHub.create

    def create_when_no_run_found_one(host: GitHub, body: str) -> Comment:
        """Let each run's first comment wait until all runs have looked for one."""
        if threading.get_ident() not in met:
            met.add(threading.get_ident())
            none_found.wait(60)
        return create(host, body)

    monkeypatch.setattr(GitHub, "create", create_when_no_run_found_one)

    def one(number: int) -> None:
        arguments = argparse.Namespace(service="github", repository=None, number=NUMBER, wait=60.0)
        write_comment(find_host(arguments, os.environ), "aorta", texts[number])

    threads = [threading.Thread(target=one, args=(number,)) for number in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(server.comments) == 1
    assert server.bodies()[0] in {f"{MARKER}\n{text}" for text in texts}
    assert server.counted("POST") >= len(runs)


def test_duplicate_that_another_run_has_deleted_is_no_error(job, server):
    server.add(f"{MARKER}\n1", BOT)
    later = server.add(f"{MARKER}\n2", BOT)
    server.hooks["DELETE"] = partial(server.comments.remove, later)
    assert job.on("github").run()[0] == 0
    assert len(server.comments) == 1


@pytest.mark.parametrize("service", SERVICES)
def test_comment_that_was_deleted_meanwhile_is_created_again(job, server, service):
    job.on(service).run()
    server.hooks[UPDATE[service]] = server.comments.clear
    code, out, _ = job.run()
    assert (code, out.split(":")[0]) == (0, "created")
    assert [comment["id"] for comment in server.comments] == [102]


# Permission


def test_read_only_token_of_a_fork_is_named_with_the_remedy(job, server):
    code, _, err = job.on("github", READ_ONLY).run()
    assert code == 1
    assert err == (
        "aorta: GitHub: POST /repos/octo/repo/issues/12/comments: status 403: Resource not accessible by integration; "
        "give the job `permissions: pull-requests: write`; the token of a pull request from a "
        "fork is read-only, so comment in a workflow of the event workflow_run instead (docs/ci.md)\n"
    )
    assert server.counted("POST") == 1


@pytest.mark.parametrize(
    ("service", "token"), [("github", READ_ONLY), ("github", "ghs_expired"), ("gitlab", "glpat-x")]
)
def test_denied_comment_is_a_warning_on_request(job, service, token):
    code, out, err = job.on(service, token).run("--if-denied=warn")
    assert (code, err) == (0, "")
    assert out.startswith("WARNING: no comment was written: Git")


def test_token_of_a_gitlab_job_is_tried_and_named(job):
    job.on("gitlab").monkeypatch.delenv("GITLAB_TOKEN")
    job.set(CI_JOB_TOKEN=JOB)
    code, _, err = job.run()
    assert code == 1
    assert "status 401" in err
    assert "the token of a job (CI_JOB_TOKEN) may not comment" in err
    assert {request.headers.get("Job-Token") for request in job.server.requests} == {JOB}


def test_pull_request_that_does_not_exist_is_an_error(job, server):
    code, _, err = job.on("github").run("--number", "99")
    assert code == 1
    assert "GET /repos/octo/repo/issues/99/comments: status 404: Not Found" in err


def test_refused_text_is_an_error_with_the_reasons(job, server):
    body = '{"message": "Validation Failed", "errors": [{"message": "body is too long"}]}'
    server.faults.append(Fault("POST", 422, body=body))
    code, _, err = job.on("github").run()
    assert code == 1
    assert 'status 422: Validation Failed [{"message": "body is too long"}]' in err


# Rate limits and failures of the server


@pytest.mark.parametrize("service", SERVICES)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_rate_limit_is_waited_for(job, server, service, method):
    server.faults.append(Fault(method, 429, {"Retry-After": "7"}, path="comments|notes"))
    assert job.on(service).run()[0] == 0
    assert job.slept == [7.0]
    assert len(server.comments) == 1


@pytest.mark.parametrize(
    ("headers", "body", "waited"),
    [
        ({"Retry-After": "3"}, "{}", 3.0),
        ({"X-RateLimit-Remaining": "0", "X-RateLimit-Reset": str(int(time.time()) - 5)}, "{}", 1.0),
        ({}, '{"message": "You have exceeded a secondary rate limit"}', 60.0),
    ],
)
def test_rate_limit_of_github_with_status_403_is_not_a_denial(job, server, headers, body, waited):
    server.faults.append(Fault("POST", 403, headers, body))
    assert job.on("github").run()[0] == 0
    assert job.slept == [waited]


def test_reset_in_the_future_is_waited_for(job, server):
    reset = str(int(time.time()) + 50)
    server.faults.append(Fault("GET", 403, {"X-RateLimit-Remaining": "0", "X-RateLimit-Reset": reset}, path="comments"))
    assert job.on("github").run()[0] == 0
    assert 0 < job.slept[0] <= 51


def test_date_of_retry_after_is_waited_for(job, server):
    date = email.utils.formatdate(time.time() + 50, usegmt=True)
    server.faults.append(Fault("GET", 429, {"Retry-After": date}, path="comments"))
    assert job.on("github").run()[0] == 0
    assert 1 < job.slept[0] <= 50


@pytest.mark.parametrize("after", ["soon", "-3", "1e9"])
def test_wait_that_can_not_be_read_is_a_minute(job, server, after):
    server.faults.append(Fault("GET", 429, {"Retry-After": after}, path="comments"))
    assert job.on("github").run()[0] == 0
    assert job.slept == [60.0]


def test_rate_limit_that_does_not_end_is_an_error_and_not_a_denial(job, server):
    server.faults.append(Fault("POST", 403, {"Retry-After": "1"}, times=9))
    code, _, err = job.on("github").run("--if-denied=warn")
    assert (code, server.counted("POST")) == (1, 4)
    assert "status 403: a fault" in err


def test_wait_that_is_longer_than_allowed_is_an_error_at_once(job, server):
    server.faults.append(Fault("GET", 429, {"Retry-After": "3600"}, path="comments", times=9))
    code, _, err = job.on("github").run("--wait", "100")
    assert code == 1
    assert "asks to wait 3600 s, and --wait leaves 100 s" in err
    assert job.slept == []


def test_failed_server_without_time_for_another_attempt_is_reported_by_its_status(job, server):
    server.faults.append(Fault("GET", 503, path="comments", times=9))
    code, _, err = job.on("github").run("--wait", "2")
    assert code == 1
    assert "status 503: a fault" in err
    assert "asks to wait" not in err
    assert job.slept == [1.0]


def test_waits_are_bounded_together(job, server):
    server.faults.append(Fault("GET", 429, {"Retry-After": "40"}, path="comments", times=9))
    code, _, err = job.on("github").run("--wait", "100")
    assert code == 1
    assert "asks to wait 40 s, and --wait leaves 20 s" in err
    assert job.slept == [40.0, 40.0]


@pytest.mark.parametrize("service", SERVICES)
def test_failed_server_is_asked_again(job, server, service):
    server.faults += [Fault("GET", 502, body="<html>", path="comments|notes", times=2)]
    assert job.on(service).run()[0] == 0
    assert job.slept == [1.0, 2.0]


def test_server_that_keeps_failing_is_an_error_after_four_requests(job, server):
    server.faults += [Fault("GET", 503, path="comments", times=99)]
    code, _, err = job.on("github").run()
    assert code == 1
    assert "GET /repos/octo/repo/issues/12/comments: status 503: a fault" in err
    assert sum("comments" in request.path for request in server.requests) == 4


@pytest.mark.parametrize("service", SERVICES)
def test_comment_that_was_created_without_an_answer_is_found_and_not_created_again(job, server, service):
    server.faults.append(Fault("POST", 502, after=True))
    assert job.on(service).run()[0] == 0
    assert server.bodies() == [f"{MARKER}\n{TEXT}"]
    assert server.counted("POST") == 1


def test_comment_that_was_not_created_is_tried_three_times(job, server):
    server.faults.append(Fault("POST", 502, times=9))
    code, _, err = job.on("github").run()
    assert (code, server.counted("POST")) == (1, 3)
    assert "status 502" in err


@pytest.mark.parametrize("body", ["", "<html>", "[", "{}", "[1]", '[{"id": "7"}]', "[" * 10_000, '[{"id": NaN}]'])
def test_answer_that_is_not_a_list_of_comments_is_an_error(job, server, body):
    server.faults.append(Fault("GET", 200, body=body, path="comments"))
    code, _, err = job.on("github").run()
    assert code == 1
    assert err.startswith("aorta: ")
    assert server.counted("POST") == 0


def test_server_that_is_not_there_is_an_error(job, server):
    job.on("github").set(GITHUB_API_URL="http://127.0.0.1:9")
    code, _, err = job.run()
    assert code == 1
    assert "no answer: URLError" in err


def test_server_that_does_not_answer_in_time_is_an_error(job, server, monkeypatch):
    monkeypatch.setattr(client, "_REQUEST_S", LIMIT_S)
    is_given_up = threading.Event()
    server.hooks["GET"] = partial(is_given_up.wait, 60)
    job.on("github", PERSON)
    assert job.run()[0] == 0
    is_given_up.set()
    assert job.slept == [1.0]


@pytest.mark.parametrize("status", [200, 400])
def test_answer_that_comes_byte_by_byte_is_given_up(job, server, monkeypatch, status):
    monkeypatch.setattr(client, "_REQUEST_S", LIMIT_S)
    server.faults.append(Fault("GET", status, body=" " * 600, path="comments", pause_s=0.1))
    assert job.on("github").run()[0] == 0
    assert job.slept == [1.0]


def test_answer_without_end_is_an_error(job, server, monkeypatch):
    monkeypatch.setattr(client, "_MAX_ANSWER", 1000)
    server.faults.append(Fault("GET", 200, body=" " * 2000, path="comments", times=9))
    assert "more than 1000 bytes" in job.on("github").run()[2]


# Other hosts


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_redirect_within_the_host_is_followed_with_method_and_text(job, server, status):
    moved = {"Location": f"{server.url}/repos/{REPOSITORY}/issues/{NUMBER}/comments"}
    server.faults.append(Fault("POST", status, moved, path="old"))
    server.faults.append(Fault("GET", status, {"Location": moved["Location"] + "?per_page=100"}, path="old", times=2))
    assert job.on("github").run("--repository", "octo/old")[0] == 0
    assert server.bodies() == [f"{MARKER}\n{TEXT}"]


def test_token_is_not_sent_to_another_host(job, server):
    with serving() as other:
        server.faults.append(Fault("GET", 302, {"Location": f"{other.url}/repos"}, path="comments"))
        code, _, err = job.on("github").run()
        assert code == 1
        assert "status 302" in err
        assert "a redirect to another host is not followed" in err
        link = {"Link": f'<{other.url}/page2>; rel="next"'}
        server.faults.append(Fault("GET", 200, link, body="[]", path="comments"))
        assert "the next page is at another host" in job.run()[2]
        assert other.requests == []


def test_token_in_a_message_of_the_server_is_replaced(job, server):
    server.faults.append(Fault("GET", 400, body=json.dumps({"message": f"bad {ACTIONS}"}), path="comments"))
    assert "status 400: bad ***" in job.on("github").run()[2]


# Size and text


@pytest.mark.parametrize(("service", "limit"), [("github", 65_536), ("gitlab", 1_000_000)])
def test_text_that_is_too_long_is_cut_with_a_note_and_taken(job, server, service, limit):
    job.write("".join(f"line {number:06d} \N{BUG}\n" for number in range(100_000)))
    assert job.on(service).run("--link", "report=https://ci.test/1")[0] == 0
    (body,) = server.bodies()
    assert limit - 400 < len(body) <= limit
    assert "characters are shown.*" in body
    assert body.endswith("[report](<https://ci.test/1>)\n")


def test_file_that_is_empty_or_absent_is_an_error(job, server):
    job.write(" \n")
    assert "empty, so there is nothing to post" in job.on("github").run()[2]
    (job.folder / "aorta.md").unlink()
    assert "aorta.md: can't be read" in job.run()[2]
    assert server.requests == []


def test_link_in_place_of_the_file_is_refused(job, server):
    """Refuse a link: the file may come from a fork's artifact, and a link could lead to a secret."""
    (job.folder / "secret").write_text("secret")
    (job.folder / "aorta.md").unlink()
    (job.folder / "aorta.md").symlink_to(job.folder / "secret")
    code, _, err = job.on("github").run()
    assert code == 1
    assert "aorta.md: can't be read" in err
    assert server.requests == []


# The pull request


def head(**changes: object) -> dict[str, object]:
    run = {
        "event": "pull_request",
        "head_branch": "topic",
        "head_sha": "c" * 40,
        "head_repository": {"owner": {"login": "forker"}},
        "pull_requests": [],
    }
    return {"workflow_run": {**run, **changes}}


def pull(number: int, label: str = "forker:topic", commit: str = "c" * 40) -> dict[str, object]:
    return {"number": number, "head": {"label": label, "sha": commit}}


def test_pull_request_from_a_fork_is_found_by_the_head_of_the_finished_workflow(job, server):
    server.pulls = [pull(NUMBER), pull(13, commit="d" * 40), pull(14, "other:topic")]
    job.on("github").event("workflow_run", head())
    assert job.run()[0] == 0
    assert server.bodies() == [f"{MARKER}\n{TEXT}"]


def test_head_that_the_token_may_not_look_for_is_a_warning_on_request(job, server):
    server.faults.append(Fault("GET", 403, path="pulls"))
    job.on("github").event("workflow_run", head())
    code, out, _ = job.run("--if-denied=warn")
    assert code == 0
    assert out.startswith("WARNING: no comment was written: GitHub: GET /repos/octo/repo/pulls: status 403")


@pytest.mark.parametrize(("pulls", "found"), [([], 0), ([pull(12, commit="d" * 40)], 0), ([pull(12), pull(13)], 2)])
def test_head_without_one_open_pull_request_is_an_error(job, server, pulls, found):
    server.pulls = pulls
    job.on("github").event("workflow_run", head())
    code, _, err = job.run()
    assert code == 1
    assert f"{found} open pull requests of octo/repo have the head cccccccccccc of forker:topic" in err
    assert server.comments == []


@pytest.mark.parametrize(
    ("name", "document", "message"),
    [
        ("push", {}, "the event 'push' belongs to no pull request"),
        ("pull_request", {"pull_request": {"number": "12; rm"}}, "the event 'pull_request' belongs to no pull request"),
        ("pull_request", {"pull_request": {"number": True}}, "the event 'pull_request' belongs to no pull request"),
        ("pull_request", {"pull_request": []}, "the event 'pull_request' belongs to no pull request"),
        ("issue_comment", {"issue": {"number": 12}}, "the event 'issue_comment' belongs to no pull request"),
        ("pull_request", "{", "GITHUB_EVENT_PATH: "),
        ("workflow_run", head(event="push"), "the finished workflow was started by 'push'"),
        ("workflow_run", head(head_sha="main"), "the finished workflow has no owner, branch and commit"),
        ("workflow_run", [], "the finished workflow was started by None"),
    ],
)
def test_event_without_a_pull_request_is_wrong_usage(job, server, name, document, message):
    job.on("github").event(name, document)
    code, _, err = job.run()
    assert code == 2
    assert message in err
    assert server.requests == []


def test_comment_on_a_pull_request_starts_a_job_that_finds_it(job, server):
    job.on("github").event("issue_comment", {"issue": {"number": NUMBER, "pull_request": {}}})
    assert job.run()[0] == 0


@pytest.mark.parametrize(
    ("service", "variables", "message"),
    [
        (
            "github",
            {"GITHUB_TOKEN": ""},
            "the variable GITHUB_TOKEN is not set; give GITHUB_TOKEN: ${{ github.token }}",
        ),
        ("github", {"GITHUB_TOKEN": "two words"}, "GITHUB_TOKEN: not a token"),
        ("github", {"GITHUB_TOKEN": "bad\n x"}, "GITHUB_TOKEN: not a token"),
        ("github", {"GITHUB_REPOSITORY": "octo/../x"}, "--repository: got 'octo/../x', allowed is OWNER/NAME"),
        ("github", {"GITHUB_API_URL": "file:///etc"}, "GITHUB_API_URL: got 'file:///etc', allowed is the address"),
        ("github", {"GITHUB_API_URL": "https://a@b/"}, "GITHUB_API_URL: got 'https://a@b/', allowed is the address"),
        ("gitlab", {"CI_MERGE_REQUEST_IID": ""}, "this pipeline belongs to no merge request"),
        ("gitlab", {"CI_MERGE_REQUEST_IID": "1/../2"}, "this pipeline belongs to no merge request"),
        ("gitlab", {"CI_MERGE_REQUEST_PROJECT_ID": "a b"}, "--repository: got 'a b'"),
    ],
)
def test_wrong_environment_is_wrong_usage(job, server, service, variables, message):
    job.on(service).set(**variables)
    code, _, err = job.run()
    assert code == 2
    assert message in err
    assert server.requests == []


def test_token_with_a_line_end_as_secrets_have_is_taken(job):
    assert job.on("github", f"{ACTIONS}\n").run()[0] == 0


def test_outside_of_ci_the_service_has_to_be_named(job, server):
    job.on("github").monkeypatch.delenv("GITHUB_ACTIONS")
    assert "--service: this is neither a job of GitHub Actions nor of GitLab CI" in job.run()[2]
    assert job.run("--service=github")[0] == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ["--key", "a--b"],
        ["--key", "a b"],
        ["--link", "report=javascript:1"],
        ["--link", "=https://a"],
        ["--link", "r=https://a>b"],
        ["--number", "0"],
        ["--wait", "-1"],
    ],
)
def test_wrong_argument_is_wrong_usage(job, capsys, arguments):
    with pytest.raises(SystemExit) as raised:
        job.run(*arguments)
    assert raised.value.code == 2
    assert "allowed is" in capsys.readouterr().err


WITHOUT = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "scipy", "jsonschema", "jsonschema_rs", "pynvml", "jinja2"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Refuse())
from pytest_aorta.cli.main import main
sys.exit(main())
"""


def test_comment_needs_no_more_packages_than_the_documented_ones(job, server):
    job.on("github")
    command = [sys.executable, "-c", WITHOUT, "comment", str(job.folder / "aorta.md")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert server.bodies() == [f"{MARKER}\n{TEXT}"]
