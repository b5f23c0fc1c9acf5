"""The commit-msg hook refuses wrong subjects, and runs in a repository."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.tooling.commit_subject import problems

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "subject",
    [
        "vllm: keep stock's graph where it is faster",
        "bench/pages, docs: read the rows of two cards",
        "World: speed up a known call",
        "Merge branch 'main'",
    ],
)
def test_commit_subject_accepts(subject: str) -> None:
    assert problems(subject) == []


@pytest.mark.parametrize(
    ("subject", "says"),
    [
        ("keep stock's graph", "no area before a colon"),
        ("vllm: keeping stock's graph", "'keeping' is not an imperative"),
        ("vllm: kept-alive ranks " + "x" * 60, "at most 72"),
        ("tests: a name", "'a' is not an imperative"),
        ("tests: name a seed.", "a full stop"),
    ],
)
def test_commit_subject_refuses(subject: str, says: str) -> None:
    assert any(says in problem for problem in problems(subject)), problems(subject)


def test_make_hooks_installs_the_hook(tmp_path: Path) -> None:
    def run(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)

    run("git", "init", "--quiet")
    (tmp_path / "tests/tooling").mkdir(parents=True)
    for name in ("Makefile", "pyproject.toml", "tests/tooling/commit_subject.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    assert run("make", "hooks").returncode == 0
    commit = "git", "-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "--allow-empty", "-m"
    refused = run(*commit, "tests: a name")
    assert refused.returncode and "'a' is not an imperative" in refused.stderr
    assert run(*commit, "tests: name a seed").returncode == 0
