"""A known call enters few Python functions (call_path.py), so that a reader can follow it and the host needs little
time."""

from __future__ import annotations

import sys

import pytest

from tests.tooling.call_path import CALLS, entered


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="comprehensions are functions in 3.11 alone")
@pytest.mark.parametrize("name", CALLS)
def test_a_known_call_enters_few_functions(name: str) -> None:
    make, most = CALLS[name]
    functions = entered(make)
    assert functions.total() <= most, functions.most_common()
