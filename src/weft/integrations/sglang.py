"""weft in SGLang: run `pip install weft` in SGLang's environment, and start SGLang with `--enable-layernorm-sp`.

With that option SGLang (0.5.20 and later) shards the tokens of a prefill between the sublayers of a dense layer, and
calls torch's fused operators, `symm_mem.fused_all_gather_matmul` and `symm_mem.fused_matmul_reduce_scatter`, for the
first and the last GEMM of each sublayer. weft's entry point in the group `sglang.srt.plugins` replaces these operators
by weft's (`weft.torch.async_tp`) in every process. It also extends the option to architectures whose decoder layers
declare the same stages as Qwen3's decoder layers.

WEFT_SGLANG=0 turns the plugin off, and so does SGLANG_PLUGINS without "weft".
"""

from __future__ import annotations

import importlib
import inspect
import logging

from . import installed_version, plugin_state, switched_off
from .torch_async_tp import AsyncTP, async_tp

log = logging.getLogger("sglang.weft")  # SGLang shows only the loggers below its own name
WEFT_SGLANG = "WEFT_SGLANG"  # the environment variable that turns the plugin off with 0
LAYERNORM_SP = "sglang.srt.layers.layernorm_sp"
CALLERS = {  # the functions that call torch's fused operators, and their parameters
    "column_parallel_g_matmul": ["linear", "input_parallel", "bias"],
    "row_parallel_gbar_matmul": ["linear", "input_", "bias"],
}
ALLOWED = "SP_SUPPORTED_ARCHITECTURES"
DENSE = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM"})

_served: list[AsyncTP] = []


def register() -> None:
    """Register the plugin. This function is the entry point, and never raises."""
    if switched_off(WEFT_SGLANG) or _served:
        return
    try:
        module = importlib.import_module(LAYERNORM_SP)
        for name, parameters in CALLERS.items():
            actual = list(inspect.signature(getattr(module, name)).parameters)
            if actual != parameters:
                raise TypeError(f"{LAYERNORM_SP}.{name} takes {', '.join(actual)}, not {', '.join(parameters)}")
        allowed = frozenset(getattr(module, ALLOWED))
        _served.append(async_tp())
        setattr(module, ALLOWED, allowed | DENSE)
        log.info(
            "weft: serves torch's fused operators of --enable-layernorm-sp, now also for %s",
            ", ".join(sorted(DENSE - allowed)) or "no further architecture",
        )
    except Exception as error:
        log.warning("weft: serves nothing: %s: %s", type(error).__name__, error)


def state() -> str:
    """Return one line that states whether SGLang would load the plugin."""
    version = installed_version("sglang")
    return "not installed" if version is None else f"{version}, {plugin_state(WEFT_SGLANG, 'SGLANG_PLUGINS')}"


def report() -> str:
    """Return a line for each of torch's fused operators, with the number of calls in this process that weft computed
    and the number that torch computed."""
    return _served[-1].report() if _served else "weft serves nothing here"
