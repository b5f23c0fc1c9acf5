"""A first call and a known call enter few Python functions (call_path.py), so a reader can follow them and the host
needs little time."""

from __future__ import annotations

import sys

import pytest

from tests.tooling.call_path import CALLS, entered


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="comprehensions are functions in 3.11 alone")
@pytest.mark.parametrize("name", CALLS)
def test_a_call_enters_few_functions(name: str) -> None:
    make, *most = CALLS[name]
    for functions, limit in zip(entered(make), most, strict=True):
        assert functions.total() <= limit, functions.most_common()
