"""Which cases `make test` runs, and which are left to `make gates`.

`some` leaves the later cases of a parameter. COVERED leaves single cases, each with the case of `make test` that runs the same code on the
same kind of operands.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import pytest


def some(cases: Iterable[Any], quick_cases: int = 1) -> list[Any]:
    """For `parametrize`: all cases, of which those behind the first few are left to `make gates`. A tuple is of several names."""

    def left(case: Any) -> Any:
        return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.gate)

    return [case if i < quick_cases else left(case) for i, case in enumerate(cases)]


PLANS, EXCHANGE, INTERFACE = (
    "emulated/test_moe_plans.py::",
    "emulated/test_moe_exchange.py::",
    "emulated/test_moe_interface.py::",
)
TRAINING, MIXTURES, MODELS = (
    "emulated/test_moe_training.py::",
    "emulated/test_models_moe.py::",
    "emulated/test_models.py::",
)
HF, HF_MOE, WRITTEN = (
    "integrations/test_hf.py::",
    "integrations/test_hf_moe.py::",
    "integrations/test_hf_parameters.py::",
)

# What matches a whole name of a case, below tests/ and with brackets as they are: the case that covers it.
COVERED: dict[str, str] = {
    # In turn are, call by call, routes at random, to few, to nowhere and some to nowhere.
    PLANS + r"test_routings[(dispatched|fused|low latency)-(?:to_few|nowhere|some_nowhere)]": PLANS + r"test_routings[\1-in_turn]",
    PLANS + r"test_any_world[fused-(\(4, 8, 4\)|\(4, 4, 1\))]": PLANS + r"test_any_world[dispatched-\1]",
    PLANS + r"test_any_world[low latency-\(4, 8, 4\)]": PLANS + "test_any_world[dispatched-(4, 8, 4)]",
    # Steps of every plan are tried in these worlds by test_any_world; the op around them is of no plan.
    PLANS + r"test_the_op_in_any_world[[13]-(dispatched|fused|low_latency)]": PLANS + r"test_the_op_in_any_world[2-\1]",
    PLANS + r"test_kinds_of_layers[gelu-(dispatched|fused)]": PLANS + r"test_activations[\1-gelu]",
    PLANS + r"test_kinds_of_layers[gelu-low_latency]": PLANS + "test_activations[low latency-gelu]",
    PLANS + r"test_kinds_of_layers[float16-(dispatched|fused)]": PLANS + r"test_activations[\1-swiglu]",
    PLANS + r"test_kinds_of_layers[float16-low_latency]": PLANS + "test_activations[low latency-swiglu]",
    PLANS + r"test_kinds_of_layers[(?:some nowhere|to few)-(dispatched|fused)]": PLANS + r"test_routings[\1-in_turn]",
    PLANS + r"test_kinds_of_layers[(?:some nowhere|to few)-low_latency]": PLANS + "test_routings[low latency-in_turn]",
    PLANS + r"test_biases_the_other_way[(?:swiglu|gelu)]": PLANS + "test_biases_the_other_way[gpt_oss]",
    PLANS + r"test_a_smaller_layer_behind_it_by_another_plan[(\w+)-1]": PLANS + r"test_a_smaller_layer_behind_it_by_another_plan[\1-0]",
    TRAINING + r"test_kinds_of_layers[(?:whole|columns)-(?:to few|some nowhere)-sequential]": "emulated/test_gloo.py::test_every_op_against_torch[2]",
    TRAINING + r"test_kinds_of_layers[columns-(gelu|nowhere|uneven)-sequential]": TRAINING + r"test_kinds_of_layers[whole-\1-sequential]",
    TRAINING + r"test_only_some_operands[whole-\('w2',\)]": TRAINING + "test_only_some_operands[columns-('w2', 'b2')]",
    TRAINING + r"test_only_some_operands[columns-\('w2',\)]": TRAINING + "test_only_some_operands[columns-('w2', 'b2')]",
    TRAINING + r"test_only_some_operands[columns-\('(x|weights|shared)',\)]": TRAINING + r"test_only_some_operands[whole-('\1',)]",
    EXCHANGE + r"test_any_world[4-4-1-(contiguous|masked)]": EXCHANGE + r"test_any_world[3-6-2-\1]",
    EXCHANGE + r"test_without_symmetric_memory_by_the_librarys_collectives[1-(\w+)]": EXCHANGE + r"test_without_symmetric_memory_by_the_librarys_collectives[3-\1]",
    INTERFACE + r"test_experts_over_groups_of_the_ranks[3-(\w+)]": INTERFACE + r"test_experts_over_groups_of_the_ranks[0-\1]",
    INTERFACE + r"test_rows_that_find_no_room_are_left_out_counted_and_raised[[123]]": INTERFACE + "test_rows_that_find_no_room_are_left_out_counted_and_raised[0]",
    INTERFACE + r"test_the_call_that_raises_overflow_was_made[1-(\w+)]": INTERFACE + r"test_the_call_that_raises_overflow_was_made[0-\1]",
    INTERFACE + r"test_rows_received_by_each_expert[1-(\w+)]": INTERFACE + r"test_rows_received_by_each_expert[2-\1]",
    INTERFACE + r"test_rows_received_in_calls_one_behind_another[1-(\w+)]": INTERFACE + r"test_rows_received_in_calls_one_behind_another[0-\1]",
    "emulated/test_two_level.py::test_many_schedules[[123]]": "emulated/test_two_level.py::test_many_schedules[0]",
    # Experts whole and split are both tried woven, and by a plain step; the layer around them is the same.
    MIXTURES + r"test_woven_is_bit_for_bit_what_is_not_woven[2-tensor]": MIXTURES + "test_woven_is_bit_for_bit_what_is_not_woven[2-expert]",
    MIXTURES + r"test_woven_is_bit_for_bit_its_two_halves[mixtral-tensor]": MIXTURES + "test_woven_is_bit_for_bit_its_two_halves[mixtral-expert]",
    MIXTURES + r"test_rows_on_every_rank_in_random_chunks[(?:plain|fused)-tensor]": MIXTURES + "test_rows_on_every_rank_in_random_chunks[woven-tensor]",
    MIXTURES + r"test_woven_and_padded_layouts_filled_again_and_again[tensor]": MIXTURES + "test_woven_and_padded_layouts_filled_again_and_again[expert]",
    MIXTURES + r"test_biases_and_norms_of_heads_by_every_plan[(plain|sequence)-qwen3]": MIXTURES + r"test_biases_and_norms_of_heads_by_every_plan[\1-qwen2]",
    MIXTURES + r"test_random_chunks_of_random_requests[qwen2_moe]": MIXTURES + "test_prompt_and_decode_steps_beside_transformers[qwen2_moe]",
    MODELS + r"test_random_chunks_of_random_requests[woven, own GEMM-2]": MODELS + "test_single_rank[woven, own GEMM]",
    MODELS + r"test_the_tables_lead_to_every_requests_keys[fused]": MODELS + "test_the_tables_lead_to_every_requests_keys[woven]",
    MODELS + r"test_woven_is_bit_for_bit_its_two_halves[0-5]": MODELS + "test_woven_is_bit_for_bit_its_two_halves[5-5]",
    MODELS + r"test_single_rank[(fused|woven|sequence)]": MODELS + r"test_random_chunks_of_random_requests[\1-2]",
    HF + r"test_two_parts_give_what_one_gives[Qwen3]": HF + "test_two_parts_give_what_one_gives[Llama]",
    HF + r"test_sharded_tokens_give_what_replicated_ones_give[Llama]": HF + "test_sharded_tokens_give_what_replicated_ones_give[Qwen2]",
    HF_MOE + r"test_two_parts_give_what_one_gives[Mixtral-2]": HF_MOE + "test_two_parts_give_what_one_gives[Qwen3Moe-2]",
    HF_MOE + r"test_every_token_is_close_by_the_experts_that_were_taken_and_these_are_near_ties[(Mixtral|GptOss)-2]": HF_MOE
    + r"test_every_token_is_close_by_the_experts_that_were_taken_and_these_are_near_ties[\1-None]",
    HF_MOE + r"test_logits_are_the_models_own_to_rounding[(Mixtral|GptOss)-False]": HF_MOE + r"test_logits_are_the_models_own_to_rounding[\1-True]",
    HF_MOE + r"test_experts_that_are_written_are_laid_out_anew[GptOss-(.*)]": HF_MOE + r"test_experts_that_are_written_are_laid_out_anew[Mixtral-\1]",
    HF_MOE + r"test_generate_gives_the_models_own_tokens[Mixtral-False]": HF_MOE + "test_generate_gives_the_models_own_tokens[GptOss-False]",
    WRITTEN + r"test_what_is_written_is_what_is_computed_with[Qwen3Moe-2]": WRITTEN + "test_what_is_written_is_what_is_computed_with[GptOss-2]",
    WRITTEN + r"test_what_is_written_is_what_is_computed_with[Qwen3-2]": WRITTEN + "test_what_is_written_is_what_is_computed_with[Llama-2]",
    # Each example's own output is what test_example runs; what it says without arguments is one function of all.
    r"tooling/test_examples.py::test_an_example_says_what_it_did_and_without_arguments_what_it_takes[(?!all_gather_rowwise).*]": "tooling/test_examples.py::"
    "test_an_example_says_what_it_did_and_without_arguments_what_it_takes[all_gather_rowwise]",
    r"tooling/test_examples.py::test_example[(\w+)-4-1]": r"tooling/test_examples.py::test_example[\1-4-0]",
}  # fmt: skip


def _pattern(name: str) -> re.Pattern[str]:
    """Of a key of COVERED: its first and its last bracket are the case's own."""
    head, _, rest = name.partition("[")
    return re.compile(rf"{re.escape(head)}\[{rest[:-1]}\]")


PATTERNS = [(_pattern(name), covering) for name, covering in COVERED.items()]


def covered_by(case: str) -> str | None:
    """The case that covers a case of that name, so that `make test` needs it alone."""
    for pattern, covering in PATTERNS:
        if match := pattern.fullmatch(case):
            return match.expand(covering)
    return None
