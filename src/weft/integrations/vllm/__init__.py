"""weft in vLLM: run `pip install weft` in vLLM's environment, then `vllm serve`.

vLLM calls the entry point in the group `vllm.general_plugins` in each of its processes. Once vLLM has loaded a
tensor-parallel model, weft's operators replace the model's sums over ranks:

    row-parallel linear -> RMSNorm -> column-parallel linear    one operator (row_norm_column.py)
    experts -> RMSNorm -> column-parallel linear                the same, without the first GEMM
    other row-parallel linears                                  row_all_reduce.py

With WEFT_VLLM_FP8=1 weft also computes the GEMMs of FP8 linears (fp8.py).

The plugin finds these sums in the model's own forward (dataflow.py). WEFT_VLLM=0 turns the plugin off. With WEFT_VLLM=1
the plugin also serves mixtures of experts.
"""

from __future__ import annotations

from ...errors import WeftError
from .. import plugin_state
from .fp8 import asked_for
from .interface import VllmObject, installed, read_interface
from .plugin import WEFT_VLLM, register

__all__ = ["register", "report", "state"]


def state() -> str:
    """Return one line that states whether vLLM would load the plugin and which functions the plugin would miss in vLLM.
    Imports vLLM if it is installed."""
    if installed() is None:
        return "not installed"
    interface = read_interface(asked_for())
    version = f"{interface.version}{'' if interface.tried else ' (untried)'}"
    switch = plugin_state(WEFT_VLLM, "VLLM_PLUGINS")
    return "; ".join([version, switch, *(f"not served: {why}" for why in interface.missing.values())])


def report(llm: VllmObject) -> str:
    """Return a line for each part of an engine (`vllm.LLM`) that weft serves, for each part that vLLM computes, with
    the reason, and for the calls so far.

    Raises WeftError if the engine's workers have not loaded weft's plugin, because the plugin is off there or not
    installed.
    """
    try:
        texts = llm.collective_rpc("weft_report")
    except Exception as error:
        raise WeftError(f"the engine's workers have no report of weft: {error}") from error
    return "\n".join(dict.fromkeys(texts))
