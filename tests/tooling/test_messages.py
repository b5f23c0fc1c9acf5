"""A caller's mistake raises an error that uses the caller's terms and names the called function."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import weft
from tests.tooling.test_cli import KERNEL
from tests.tooling.test_cli import weft as command
from weft import moe

X, W = torch.zeros(4, 32).bfloat16(), torch.zeros(16, 32).bfloat16()
IDS, WEIGHTS = torch.zeros(4, 1, dtype=torch.int32), torch.ones(4, 1)
W13, W2 = torch.zeros(2, 1, 2, 16, 32).bfloat16(), torch.zeros(2, 32, 16).bfloat16()
ONES = torch.ones(32).bfloat16()
Calls = dict[str, Callable[[weft.World], object]]
WITHOUT: Calls = {  # calls with None, by the name in their error
    "all_gather_matmul: x": lambda w: weft.all_gather_matmul(None, W, world=w),
    "all_gather_matmul: weight": lambda w: weft.all_gather_matmul(X, None, world=w),
    "matmul_reduce_scatter: x": lambda w: weft.matmul_reduce_scatter(None, W, world=w),
    "matmul_all_reduce: weight": lambda w: weft.matmul_all_reduce(X, None, world=w),
    "matmul_all_to_all: x": lambda w: weft.matmul_all_to_all(None, W, destinations=weft.route([0] * 4, world=w), world=w),
    "all_reduce: x": lambda w: weft.all_reduce(None, world=w),
    "all_reduce_rms_norm: x": lambda w: weft.all_reduce_rms_norm(None, None, ONES, world=w),
    "all_reduce_rms_norm: weight": lambda w: weft.all_reduce_rms_norm(X, None, None, world=w),
    "silu_mul: x": lambda w: weft.silu_mul(None, world=w),
    "rms_norm: x": lambda w: weft.rms_norm(None, ONES, 1e-6, world=w),
    "residual_add: x": lambda w: weft.residual_add(None, X, world=w),
    "gathered_attention: q": lambda w: weft.gathered_attention(None, None, None, world=w),
    "moe: x": lambda w: moe.moe(None, IDS, WEIGHTS, W13, W2, world=w),
    "moe: weights": lambda w: moe.moe(X.clone().requires_grad_(), IDS, None, W13, W2, world=w),
    "gate: logits": lambda w: moe.gate(None, 2, world=w),
    "moe.dispatch: x": lambda w: moe.dispatch(None, IDS, WEIGHTS, experts=4, world=w),
    "all_gather_grouped_matmul: x": lambda w: weft.all_gather_grouped_matmul(None, IDS, WEIGHTS, W13, world=w),
    "grouped_matmul_reduce_scatter: hidden": lambda w: weft.grouped_matmul_reduce_scatter(None, None, IDS, W2, world=w),
}  # fmt: skip


def error_text(call: Callable[[weft.World], object], *errors: type[Exception]) -> str:
    """Run the call on two ranks, and return the error that both raise."""

    def main(world: weft.World) -> str:
        with pytest.raises(errors) as caught:
            call(world)
        return str(caught.value)

    message, peer_message = weft.spmd(main, 2, backend="emulated")
    assert message == peer_message
    return message


@pytest.mark.parametrize("operand", WITHOUT)
def test_none_in_place_of_an_operand(operand: str) -> None:
    assert error_text(WITHOUT[operand], TypeError).startswith(f"{operand} must be a tensor")


def test_none_in_place_of_matrices_to_pack() -> None:
    assert error_text(lambda world: moe.pack(None, world=world), TypeError) == "pack: tensors are needed, not NoneType"


def test_errors_of_training_name_the_function_that_was_called() -> None:
    def call(world: weft.World, **options: Any) -> object:
        return moe.moe(X.clone().requires_grad_(), IDS, WEIGHTS, W13, W2, world=world, **options)

    assert error_text(lambda world: call(world, keep="x"), ValueError).startswith("moe: keep 'x'")
    assert error_text(lambda world: call(world, plan="x"), ValueError).startswith("moe: plan 'x'")


def test_a_rank_without_gradients_raises_the_functions_name() -> None:
    def main(world: weft.World) -> None:
        x = X.clone().requires_grad_(world.rank == 0)
        moe.moe(x, IDS, WEIGHTS, W13, W2, world=world, plan="dispatched")

    with pytest.raises(weft.Mismatch, match=r"ranks disagree on this call: rank 0: moe .*; rank 1: moe"):
        weft.spmd(main, 2, backend="emulated")


@pytest.mark.parametrize("x", [torch.zeros(4, 32), torch.zeros(2, 2, 32).bfloat16(), torch.zeros(4, 31).bfloat16()])
def test_a_layer_of_experts_names_its_arguments(x: torch.Tensor) -> None:
    def call(world: weft.World) -> object:
        return moe.MoE(32, 16, 4, 2, world=world)(x)

    shape = f"MoE: x {list(x.shape)} {str(x.dtype).removeprefix('torch.')} on cpu must be [T, 32] bfloat16"
    assert error_text(call, ValueError).startswith(shape)


@pytest.mark.parametrize("target", ["sm_99", "sm_110", "sm_75"])
def test_check_refuses_a_gpu_that_the_compiler_may_not_know(target: str, tmp_path: Path) -> None:
    (tmp_path / "kernel.py").write_text(KERNEL)
    result = command("check", tmp_path / "kernel.py", "--target", target)
    assert result.exit_code == 1 and f"{target}: no GPU that weft compiles for: sm_80, sm_86" in result.output


@pytest.mark.parametrize(
    ("text", "line"),
    [("import weft\n\nraise ValueError('no')\n", 3), ("import weft\n\ndef f(:\n", 3), ("import no_such_module\n", 1)],
)
def test_check_names_the_line_of_a_file_that_fails_at_import(
    text: str, line: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name is relative to the file's folder, as in a shell there."""
    (tmp_path / "broken.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    result = command("check", "broken.py")
    assert result.exit_code == 1 and f"broken.py:{line}: " in result.output
