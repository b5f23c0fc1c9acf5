"""weft under vLLM: `pip install weft` beside it, and `vllm serve` as ever.

An entry point of vLLM's group `vllm.general_plugins`, which vLLM calls in each of its processes. A model that is
tensor-parallel has, once it is loaded, weft's operators where its sums over ranks are:

    row-parallel linear -> RMSNorm -> column-parallel linear    one operator (row_norm_column.py)
    experts -> RMSNorm -> column-parallel linear                the same, without the first GEMM
    other row-parallel linears                                  row_all_reduce.py

Where these meet is read from the model's own forward (dataflow.py). WEFT_VLLM=0 turns it off.
"""

from __future__ import annotations

from ...errors import WeftError
from .. import plugin_state
from .interface import Theirs, installed, read_interface
from .plugin import WEFT_VLLM, register

__all__ = ["register", "report", "state"]


def state() -> str:
    """Whether the plugin would be loaded, and what it would not find, in a line. Imports vLLM where it is installed."""
    if installed() is None:
        return "not installed"
    found = read_interface()
    said = [f"{found.version}{'' if found.tried else ' (untried)'}", plugin_state(WEFT_VLLM, "VLLM_PLUGINS")]
    return "; ".join([*said, *(f"not served: {why}" for why in found.missing.values())])


def report(llm: Theirs) -> str:
    """What weft serves in an engine (`vllm.LLM`), what it leaves to vLLM and why, and the calls so far. A line each.

    Raises WeftError where its workers do not know weft: it is off there, or not installed.
    """
    try:
        texts = llm.collective_rpc("weft_report")
    except Exception as error:
        raise WeftError(f"the engine's workers have no report of weft: {error}") from error
    return "\n".join(dict.fromkeys(texts))
