"""The commit-msg hook that `make hooks` installs. The hook requires that a commit's subject has a prefix by area, is
imperative, and has at most 72 characters."""

from __future__ import annotations

import re
import sys
from pathlib import Path

NOT_IMPERATIVE = re.compile(r"(?:\w+(?:ed|ing)|adds|fixes|makes|removes|uses|tests|docs|what|how|that|the|an?)\b", re.I)
EXCEPTIONS = {"bring", "embed", "exceed", "feed", "need", "proceed", "read", "seed", "shed", "speed", "string"}


def problems(subject: str) -> list[str]:
    """Return the faults of a subject, each as a phrase."""
    if subject.startswith(("Merge ", "Revert ", "fixup! ", "squash! ")):
        return []
    prefix, colon, rest = subject.partition(": ")
    faults = []
    if not colon or not re.fullmatch(r"[A-Za-z0-9_./-]+(?:(?:, | and | )[A-Za-z0-9_./-]+){0,2}", prefix):
        faults.append('no area before a colon, such as "vllm: keep stock\'s graph where it is faster"')
        rest = subject
    verb = rest.partition(" ")[0]
    if NOT_IMPERATIVE.fullmatch(verb) and verb.lower() not in EXCEPTIONS:
        faults.append(f"{verb!r} is not an imperative")
    if len(subject) > 72:
        faults.append(f"{len(subject)} characters, at most 72")
    if subject.endswith("."):
        faults.append("a full stop at the end")
    return faults


if __name__ == "__main__":
    subject = next((line for line in Path(sys.argv[1]).read_text().splitlines() if not line.startswith("#")), "")
    if faults := problems(subject):
        sys.exit("\n".join([f"commit subject {subject!r}:", *(f"  {problem}" for problem in faults)]))
