"""Tests of examples/own_op.py: weft provides all services for a user's op from its definition; the file is short and
uses no private name.
"""

from __future__ import annotations

import ast
import importlib
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import weft
from weft.chooser import Choice, Chooser
from weft.plans import KINDS, Plan, Sequential
from weft.timing import CallTime
from weft.torch_library import text_of

FILE = Path(__file__).parents[2] / "examples" / "own_op.py"
EMULATED_CLOCK = "weft.backends.emulated.EmulatedBackend.clock"


def loaded() -> dict[str, Any]:
    """Load the file as a module, since ranks exchange its plans by their classes' names."""
    sys.path.insert(0, str(FILE.parent))
    return vars(importlib.import_module("own_op"))


@pytest.fixture(scope="module")
def own_op() -> dict[str, Any]:
    return loaded()


def shard(world: weft.World, rows: int = 4, seed: int = 0) -> torch.Tensor:
    shards = torch.randn(world.size, rows, 64, generator=torch.Generator().manual_seed(seed)).bfloat16()
    return shards[world.rank].to(world.device)


def test_the_file_is_short_and_imports_public_names() -> None:
    source = FILE.read_text()
    assert len(source.splitlines()) < 120
    names = {n.module for n in ast.walk(ast.parse(source)) if isinstance(n, ast.ImportFrom)}
    assert names <= {"dataclasses", "weft.plans"}
    assert not any(n.attr.startswith("_") for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Attribute))


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


def test_a_compiled_graph_holds_it(own_op: dict[str, Any]) -> None:
    def rank(world: weft.World) -> None:
        op = own_op["all_gather_rms_norm"]
        compiled = torch.compile(op, backend="aot_eager", fullgraph=True)
        for plan in ("auto", "sequential", own_op["Pushed"](rows=2)):
            assert torch.equal(compiled(shard(world), world=world, plan=plan), op(shard(world), world=world, plan=plan))

    weft.spmd(rank, 2, backend="emulated")


@pytest.mark.parametrize("compiled", [False, True])
def test_its_gradient(own_op: dict[str, Any], compiled: bool) -> None:
    def rank(world: weft.World) -> float:
        op = own_op["all_gather_rms_norm"]
        op = torch.compile(op, backend="aot_eager", fullgraph=True) if compiled else op
        dys = torch.randn(world.size, world.size * 4, 64, generator=torch.Generator().manual_seed(9))
        x = shard(world).requires_grad_()
        op(x, world=world).backward(dys[world.rank].bfloat16().to(world.device))
        world.synchronize()
        leaf = shard(world).double().requires_grad_()
        shard_rows = slice(world.rank * 4, world.rank * 4 + 4)
        torch.rms_norm(leaf, (64,), eps=1e-6).backward(dys.bfloat16().double().sum(0)[shard_rows])
        assert x.grad is not None and leaf.grad is not None
        return float((x.grad.double() - leaf.grad).norm() / leaf.grad.norm())

    assert max(weft.spmd(rank, 3, backend="emulated")) < 1e-2


def kept_norm(own_op: dict[str, Any], backwards: list[tuple[Any, ...]]) -> Any:
    """Define the op again, with runs that save the norm's scale if a gradient is needed; `backwards` records the
    arguments of each backward pass."""

    @dataclass(frozen=True)
    class KeptCall(own_op["GatherNormCall"]):  # type: ignore[misc]
        gradient: bool

    def keeping(prepare: Any) -> Any:
        def prepare_and_keep(world: weft.World, call: Any, plan: Plan) -> Any:
            run = prepare(world, call, plan)

            def run_and_keep(operands: Any, out: torch.Tensor) -> Any:
                run(operands, out)
                (x,), scale = operands, world.empty((call.m, 1), torch.float32)
                if not call.gradient:
                    return None
                rsqrt = lambda: scale.copy_(torch.rsqrt(x.float().square().mean(1, keepdim=True) + 1e-6))  # noqa: E731
                world.call(rsqrt, [x], [scale], world.current_stream())
                return (scale,)

            return run_and_keep

        return prepare_and_keep

    class KeptNorm(own_op["GatherNorm"]):  # type: ignore[misc]
        name = "all_gather_rms_norm_kept"
        signature = "Tensor x, bool gradient"
        num_saved = 1
        runs = {kind: keeping(run) for kind, run in own_op["GatherNorm"].runs.items()}

        def check(self, world: weft.World, operands: Any, options: Any) -> Any:
            call = super().check(world, operands, ())
            return KeptCall(call.m, call.h, call.world, call.dtype, options[-1])

        def saved_shapes(self, world: weft.World, call: Any, plan: Any) -> Any:
            return [((call.m, 1), torch.float32)] if call.gradient else []

        def saved_tensors(self, operands: Any, results: Any, options: Any, needs: Any) -> Any:
            return *operands, *results[1:]

        def backward(self, world: weft.World, context: Any) -> Any:
            (x, scale), (dy,) = context.saved, context.gradients
            backwards.append((context.call, context.plan, scale.shape))
            dx, g, stream = world.empty(x.shape, x.dtype), world.empty(x.shape, dy.dtype), world.current_stream()
            world.reduce_scatter(g, dy.contiguous(), stream)
            through_norm = lambda: dx.copy_(scale * (g - x * scale * (g * x * scale).mean(1, keepdim=True)))  # noqa: E731
            world.call(through_norm, [x, g, scale], [dx], stream)
            return [dx]

    return weft.registered(KeptNorm()), KeptCall


@pytest.mark.parametrize("compiled", [False, True])
def test_saved_tensors_and_the_chosen_plan_reach_the_backward_pass(own_op: dict[str, Any], compiled: bool) -> None:
    """The backward pass receives the call and the chosen plan, even if a different plan was requested; without a
    gradient, the forward pass saves no tensor."""
    backwards: list[tuple[Any, ...]] = []
    op, kept_call = kept_norm(own_op, backwards)
    pushed = own_op["Pushed"]
    chosen = {
        "auto": pushed(rows=2),
        "sequential": Sequential(),
        pushed(rows=1): pushed(rows=1),
        pushed(rows=3): Sequential(),
    }

    def rank(world: weft.World) -> None:
        call = lambda x, plan: op(world, plan, (x,))  # noqa: E731
        forward = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=False) if compiled else call
        leaves = {plan: shard(world).requires_grad_() for plan in chosen}
        results = {plan: forward(leaf, plan) for plan, leaf in leaves.items()}
        with torch.no_grad():
            assert all(torch.equal(call(leaves[plan], plan), y) for plan, y in results.items())
        for plan, y in results.items():
            expected_leaf = shard(world).requires_grad_()
            dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(world.rank)).bfloat16()
            own_op["all_gather_rms_norm"](expected_leaf, world=world, plan=plan).backward(dy)
            y.backward(dy)
            assert torch.equal(leaves[plan].grad, expected_leaf.grad) and expected_leaf.grad.norm() > 0  # type: ignore[arg-type, union-attr]

    weft.spmd(rank, 2, backend="emulated")
    assert [plan for _, plan, _ in backwards[::2]] == list(chosen.values())
    assert {call for call, _, _ in backwards} == {kept_call(4, 64, 2, torch.bfloat16, True)}
    assert {shape for *_, shape in backwards} == {(4, 1)}


def test_errors_and_plans_that_do_not_fit(own_op: dict[str, Any]) -> None:
    def rank(world: weft.World) -> None:
        op = own_op["all_gather_rms_norm"]
        with pytest.raises(ValueError, match=r"x must be \[m, H\]"):
            op(shard(world)[0], world=world)
        uneven = op(shard(world, rows=3), world=world, plan=own_op["Pushed"](rows=2))  # runs as sequential
        assert uneven.shape == (3 * world.size, 64)
        with pytest.raises(ValueError, match="fused.*is not"):
            op(shard(world), world=world, plan="fused")

    weft.spmd(rank, 2, backend="emulated")


def test_its_plan_travels_as_any_other(own_op: dict[str, Any]) -> None:
    plan = own_op["Pushed"](rows=8)
    assert KINDS["pushed"] is type(plan) and Plan.from_json(plan.to_json()) == plan
    assert text_of(plan) == "Pushed;rows=8"


def test_auto_chooses_the_fastest_plan(own_op: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The slowest rank's time counts. A gain below MIN_SPEEDUP over sequential, or over a plan that the op lists
    earlier, is ignored."""
    op, plans = own_op["GATHER_NORM"], (own_op["Pushed"](), own_op["Pushed"](rows=1))
    monkeypatch.setattr(
        "weft.planner.auto._planner_or_unusable", lambda world: pytest.fail("a planner, which has no model of it")
    )
    monkeypatch.setattr(EMULATED_CLOCK, True)
    plans_by_rank = weft.spmd(lambda world: _four(world, op, plans, monkeypatch), 2, backend="emulated", sm_count=32)
    assert plans_by_rank[0] == plans_by_rank[1] == [plans[1], Sequential(), Sequential(), plans[0]]


def _four(world: weft.World, op: Any, plans: tuple[Plan, Plan], monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    first_us = {2: 90.0, 4: 200.0, 6: 200.0, 8: 50.4}  # in us, for each number of rows
    pushed = {2: (50.0, 50.0), 4: (99.5, 99.5), 6: (50.0, 150.0), 8: (50.0, 50.0)}  # one time for each rank

    def time(self: Chooser, choice: Choice[Plan], plan: Plan, times: int, ahead: float) -> CallTime:
        m = choice.sizes[0] // world.size
        ranks: Any = self.ranks
        us = {Sequential(): 100.0, plans[0]: first_us[m], plans[1]: pushed[m][ranks.rank]}.get(plan, 200.0)
        return CallTime(us, us)

    monkeypatch.setattr(Chooser, "time", time)
    calls = [(op.check(world, (x,), ()), (x,)) for x in (shard(world, rows) for rows in pushed)]
    for call, operands in calls:
        world.choices.trial(op.choice(world, call, operands))
    return [op.choose(world, call, "auto", False) for call, _ in calls]


def test_a_trial_of_long_calls_has_several_rounds(own_op: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial of long calls times fewer calls in each round, and two rounds of calls of a second: a single round would
    not show how much calls differ."""
    op, asked = own_op["GATHER_NORM"], {2: [], 4: [], 6: []}  # the calls in a turn, for each number of rows
    call_us = {2: 1e3, 4: 15e3, 6: 1e6}  # the time of a call in us

    def time(self: Chooser, choice: Choice[Plan], plan: Plan, times: int, ahead: float) -> CallTime:
        m, ranks = choice.sizes[0] // 2, self.ranks
        asked[m] += [times] if plan == Sequential() and not ranks.rank else []  # type: ignore[union-attr]
        return CallTime(call_us[m], 0.0)

    monkeypatch.setattr(Chooser, "time", time)
    monkeypatch.setattr(EMULATED_CLOCK, True)

    def main(world: weft.World) -> None:
        for x in (shard(world, rows) for rows in call_us):
            world.choices.trial(op.choice(world, op.check(world, (x,), ()), (x,)))

    weft.spmd(main, 2, backend="emulated", sm_count=32)
    assert asked == {2: [1, *[10] * 5], 4: [1, *[2] * 5], 6: [1, *[1] * 2]}


def test_a_reloaded_file_leaves_earlier_plans_registered() -> None:
    """Ranks exchange plans by their classes' names."""
    mains = [weft.check.load(str(FILE)) for _ in range(2)]
    for main in mains:
        weft.spmd(main, 2, backend="emulated")


def test_ranks_on_gpus_import_no_emulator() -> None:
    """A machine with GPUs may lack greenlet, which the emulator needs."""
    without_greenlet = f"import sys; sys.modules['greenlet'] = None; import {__name__}"
    subprocess.run([sys.executable, "-c", without_greenlet], check=True, cwd=FILE.parents[1])


@pytest.mark.gpu
def test_on_gpus() -> None:
    """plan="auto" works eagerly, in a CUDA graph, compiled, and with a gradient."""
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", __name__]
    env = os.environ | {"WEFT_SHARE_GPU": "1"}
    done = subprocess.run(run, capture_output=True, text=True, timeout=200, env=env)
    assert done.returncode == 0 and done.stdout.count("own op: right") == 2, done.stdout[-2000:] + "\n".join(
        line for line in done.stderr.splitlines() if "Error" in line
    )


def main() -> None:
    own_op = loaded()
    world, op = weft.init(), own_op["all_gather_rms_norm"]
    for rows in (16, 100, 512):
        whole = torch.randn(2 * rows, 4096, generator=torch.Generator().manual_seed(rows)).bfloat16()
        x = whole.view(2, rows, 4096)[world.rank].to(world.device)
        expected = torch.rms_norm(whole.float(), (4096,), eps=1e-6).to(world.device)
        for plan in ("auto", "pushed", "sequential"):
            torch._dynamo.reset()
            for _ in range(20):
                y = op(x, world=world, plan=plan)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                again = op(x, world=world, plan=plan)
            for _ in range(5):
                graph.replay()
            compiled = torch.compile(op, backend="aot_eager", fullgraph=True)(x, world=world, plan=plan)
            torch.cuda.synchronize()
            for actual in (y, again, compiled):
                assert (actual.float() - expected).abs().max() < 0.04, (rows, plan)
            del graph  # NCCL waits for the end of graphs that contain its collectives before it destroys a communicator
        leaf = x.detach().requires_grad_()
        op(leaf, world=world).float().square().sum().backward()  # the sum of squares of a norm does not depend on x
        assert leaf.grad is not None and leaf.grad.abs().max() < 0.2
    world.synchronize()
    print("own op: right", flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
