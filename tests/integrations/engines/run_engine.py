"""Run engines of vLLM one after the other in one process, with two CPU ranks each. `python run_engine.py OUT JOB..`, a
job KIND:eager, KIND:compiled or KIND:woven (eager, with passes in two parts over whole layers). For each job, the JSON
file OUT receives the tokens with the plugin, the tokens without it in the same engine (except for compiled jobs), and
the plugin's report.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

SIZES = dict(
    vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=32, max_position_embeddings=128, bos_token_id=1, eos_token_id=2, tie_word_embeddings=False,
)  # fmt: skip
EXPERTS = dict(moe_intermediate_size=64, num_experts=4, num_experts_per_tok=2, norm_topk_prob=True)
WIDE = dict(hidden_size=512, intermediate_size=1024, num_attention_heads=8, num_key_value_heads=4, head_dim=64)
KINDS: dict[str, dict[str, Any]] = {
    "Llama": {}, "Qwen3": {}, "Qwen3Moe": EXPERTS, "LlamaFP8": WIDE, "LlamaFP8Block": WIDE,
}  # fmt: skip
EIGHT_BITS = dict(num_bits=8, type="float", symmetric=True)
QUANTIZED: dict[str, dict[str, Any]] = {  # the kinds whose linears have 8-bit weights, with the checkpoint's entry
    "LlamaFP8": dict(
        quant_method="compressed-tensors", format="float-quantized", quantization_status="compressed", ignore=["lm_head"],
        config_groups=dict(group_0=dict(
            targets=["Linear"], weights=dict(EIGHT_BITS, strategy="channel", dynamic=False),
            input_activations=dict(EIGHT_BITS, strategy="token", dynamic=True),
        )),
    ),
    "LlamaFP8Block": dict(
        quant_method="fp8", activation_scheme="dynamic", fmt="e4m3", weight_block_size=[128, 128],
        modules_to_not_convert=["lm_head"],
    ),
}  # fmt: skip
PROMPTS = [[1, 5, 7, 9], list(range(3, 40)), [11] * 9]
# Prompts are processed in chunks, the second prompt begins like the first, and the cache is too small for all four
# requests.
CROWDED = dict(
    max_num_batched_tokens=24, enable_chunked_prefill=True, enable_prefix_caching=True, block_size=32, num_gpu_blocks_override=7
)  # fmt: skip
CROWD = [list(range(3, 63)), [*range(3, 40), *range(63, 86)], [11] * 9, [*[1, 5, 7, 9] * 14, 1, 5]]


def checkpoint(kind: str, folder: str, dtype: str) -> str:
    """Return a model with random weights that are large enough to affect the output."""
    import torch
    import transformers

    torch.manual_seed(0)
    family = kind.partition("FP8")[0]
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **KINDS[kind]})
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.1) if p.dim() == 1 else p.mul_(4)
    tensors = quantized_linears(model, kind) if kind in QUANTIZED else {}
    if tensors:
        model.save_pretrained(exact(kind, folder))
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    if tensors:
        write_quantized(folder, tensors, QUANTIZED[kind])
    return folder


def exact(kind: str, folder: str) -> str:
    """Return the folder of the same model for Transformers; quantised weights are dequantized to 32 bits."""
    return f"{folder}/dequantized" if kind in QUANTIZED else folder


def quantized_linears(model: Any, kind: str) -> dict[str, Any]:
    """Return the weights and scales of the layers' linears, and replace their weights by the dequantized values."""
    import torch

    tensors, block = {}, QUANTIZED[kind]["quant_method"] == "fp8"
    for name, module in model.model.layers.named_modules(prefix="model.layers"):
        if not isinstance(module, torch.nn.Linear):
            continue
        n, k = module.weight.shape
        groups = module.weight.data.view(n // 128, 128, k // 128, 128) if block else module.weight.data
        scale = groups.abs().amax((1, 3) if block else 1, keepdim=True) / 448
        elements = (groups / scale).to(torch.float8_e4m3fn)
        module.weight.data = (elements.float() * scale).view(n, k)
        tensors[f"{name}.weight"] = elements.view(n, k)
        tensors[f"{name}.weight_scale{'_inv' * block}"] = scale.view(n // 128, k // 128) if block else scale
    return tensors


def write_quantized(folder: str, tensors: dict[str, Any], entry: dict[str, Any]) -> None:
    """Write the tensors and the configuration's entry to a checkpoint."""
    from safetensors.torch import load_file, save_file

    weights, config = f"{folder}/model.safetensors", Path(folder) / "config.json"
    save_file({**load_file(weights), **tensors}, weights, {"format": "pt"})
    config.write_text(json.dumps({**json.loads(config.read_text()), "quantization_config": entry}))


def undo(worker: Any) -> None:
    """Restore vLLM's own model in this worker."""
    from weft.integrations.vllm.served import models

    models[-1].passes.remove()


def weave(worker: Any) -> None:
    """Weave this worker's passes, and record them."""
    from weft.integrations.vllm import woven
    from weft.integrations.vllm.row_norm_column import WovenLayers
    from weft.integrations.vllm.served import counts, models

    passes, run, worker.woven = models[-1].passes, woven.WovenPass.__call__, []

    def noted(self: Any, form: Any, input_ids: Any, positions: Any) -> Any:
        batch = self.attention._batch
        starts = batch.query_start_loc_cpu[: batch.num_reqs + 1].tolist()
        worker.woven.append([batch.num_actual_tokens, batch.num_reqs, self.cut(len(input_ids)) in starts])
        return run(self, form, input_ids, positions)

    woven.WovenPass.__call__ = noted
    passes.woven.attach(worker.model_runner)
    passes.serve([(2, passes.max_tokens, WovenLayers())])
    models[-1].counts = counts(passes.world)


def woven_batches(worker: Any) -> list[Any]:
    """Return, for each woven pass, the numbers of tokens and requests, and whether the split was between two
    requests."""
    return worker.woven


def tokens(llm: Any, prompts: list[list[int]]) -> list[list[tuple[int, float]]]:
    """Return the tokens of each prompt's answer, and the margin by which each token's logit exceeded the second
    best."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False, logprobs=2)
    answers = llm.generate([{"prompt_token_ids": p} for p in prompts], params)
    best = [[sorted((candidate.logprob for candidate in step.values()), reverse=True) for step in a.outputs[0].logprobs] for a in answers]  # fmt: skip
    return [
        [
            (token, best_logprob - second_logprob)
            for token, (best_logprob, second_logprob, *_) in zip(a.outputs[0].token_ids, rows, strict=True)
        ]
        for a, rows in zip(answers, best, strict=True)
    ]


def run(job: str) -> dict[str, Any]:
    from vllm import LLM

    import weft

    kind, mode = job.split(":")
    dtype = "bfloat16" if kind == "Qwen3Moe" or kind in QUANTIZED else "float32"
    with tempfile.TemporaryDirectory() as folder:
        llm = LLM(
            checkpoint(kind, folder, dtype),
            skip_tokenizer_init=True,
            tensor_parallel_size=2,
            dtype=dtype,
            max_model_len=96,
            max_num_seqs=4,
            enforce_eager=mode != "compiled",
            disable_log_stats=mode != "woven",
            **(CROWDED if mode == "woven" else dict(enable_prefix_caching=False, kv_cache_memory_bytes=1 << 27)),
        )
        prompts = CROWD if mode == "woven" else PROMPTS
        if mode == "woven":
            llm.collective_rpc(weave)
        results: dict[str, Any] = dict(tokens=tokens(llm, prompts))
        if os.environ.get("WEFT_VLLM") != "1":
            return results
        results["report"] = weft.vllm.report(llm)
        if mode == "woven":
            results["batches"] = llm.collective_rpc(woven_batches)
            results["metrics"] = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
        if mode != "compiled":
            llm.collective_rpc(undo)
            llm.reset_prefix_cache()
            results["own"] = tokens(llm, prompts)
        llm.llm_engine.engine_core.shutdown()
    return results


if __name__ == "__main__":
    with open(sys.argv[1], "w") as out:
        json.dump({job: run(job) for job in sys.argv[2:]}, out)
