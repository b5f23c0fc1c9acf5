"""8-bit operands in the emulator: every recipe is compared with dequantized float64 products, and unsupported operands
raise errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import weft
from tests.emulated.cases import distance, draw
from tests.emulated.cases_fp8 import SCALINGS, case, dequantized, factors, matmul_case, quantize_case, scaled
from tests.emulated.cases_ops import OPS
from tests.gates import covered, some
from weft.backends.emulated import EmulatedBackend
from weft.chooser import Choice, Chooser
from weft.lang.mapping import balanced_rows
from weft.op import REGISTRY
from weft.ops.recipes import ScaledFactors, block_rows, with_scaled_tiles
from weft.plans import FusedGather, FusedGatherByCopies, FusedReduceScatter, GemmTile, Persistent, Plan
from weft.prepared import Prepared
from weft.scale import SMALL_TILE
from weft.scaled_tensor import E4M3, ScaledTensor, Scaling
from weft.timing import CallTime

BF16 = 3e-3  # relative error of exact sums that are rounded to bfloat16


def alone(fn: Any, **options: Any) -> Any:
    return weft.spmd(fn, 1, backend="emulated", **options)[0]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    m=st.integers(1, 70), n=st.integers(1, 20), k=st.integers(1, 4), scaling=st.sampled_from(SCALINGS),
    bias=st.booleans(), fast=st.booleans(), by_columns=st.booleans(), seed=st.integers(0, 9),
)  # fmt: skip
def test_own_kernel(m: int, n: int, k: int, scaling: str, bias: bool, fast: bool, by_columns: bool, seed: int) -> None:
    k = 128 * k if scaling == "block" else 16 * k + 16
    case = dict(bias=bias, fast=fast, seed=seed, by_columns=by_columns and scaling == "block")
    assert alone(lambda w: matmul_case(w, m, 8 * n, k, scaling, **case)) < BF16


@pytest.mark.parametrize("scaling", SCALINGS)
def test_weights_of_several_blocks(scaling: str) -> None:
    """A weight of 300 rows has three blocks of 128, and the last one is short."""
    for plan in ("persistent", "auto", Persistent(tile=GemmTile(32, 64, 128, 4, 3, 4), flatten=False)):
        assert alone(lambda w, plan=plan: matmul_case(w, 40, 296, 384, scaling, plan, True, torch.float16)) < 5e-4


@pytest.mark.parametrize("scaling", SCALINGS)
def test_no_rows_and_one(scaling: str) -> None:
    for m in (0, 1):
        for plan in ("persistent", "auto"):
            assert alone(lambda w, m=m, plan=plan: matmul_case(w, m, 24, 256, scaling, plan)) < BF16


def operands(
    recipe: str, device: torch.device, m: int = 24, n: int = 40, k: int = 256
) -> tuple[ScaledTensor, ScaledTensor]:
    x, w, xs, ws = factors(1, m, n, k, recipe, device)
    return ScaledTensor(x, xs, recipe), ScaledTensor(w, ws, recipe)


def test_vectors_of_scales_have_any_shape() -> None:
    """A vector of scales gives the same bits in every shape."""

    def rank(world: weft.World) -> None:
        shapes: dict[str, list[tuple[tuple[int, ...], tuple[int, ...]]]] = {
            "row": [((24, 1), (40, 1)), ((24,), (40,)), ((24, 1), (1, 40))],
            "tensor": [((1,), (1,)), ((), (1, 1))],
        }
        for recipe, pairs in shapes.items():
            x, w = operands(recipe, world.device)
            as_given, *reshaped = [
                weft.matmul(x._replace(scales=x.scales.view(a)), w._replace(scales=w.scales.view(b)), world=world, plan="persistent")
                for a, b in pairs
            ]  # fmt: skip
            world.synchronize()
            assert all(torch.equal(y, as_given) for y in reshaped)

    alone(rank)


def refused(
    error: type[Exception], match: str, x: Any = None, weight: Any = None, recipe: str = "row", **options: Any
) -> None:
    """`x` and `weight` replace fields of supported operands or whole operands."""

    def rank(world: weft.World) -> None:
        fitting = operands(recipe, world.device)
        pair = [
            t._replace(**u) if isinstance(u, dict) else t if u is None else u
            for t, u in zip(fitting, (x, weight), strict=True)
        ]
        with pytest.raises(error, match=match):
            weft.matmul(*pair, options.pop("bias", None), world=world, **options)

    alone(rank)


def test_scales_that_do_not_fit_are_quoted() -> None:
    ones = torch.ones
    refused(
        ValueError,
        r"x.scales \[23, 1\] do not fit x.values \[24, 256\].* by row they are \[24, 1\]",
        dict(scales=ones(23, 1)),
    )
    refused(
        ValueError, r"weight.scales \[1, 41\] do not fit .* by row they are \[40, 1\]", weight=dict(scales=ones(1, 41))
    )
    refused(ValueError, r"x.scales \[1\] do not fit", dict(scales=ones(1)))
    refused(
        ValueError,
        r"x.scales \[24, 1\] do not fit .* by tensor they are \[1\]",
        dict(scales=ones(24, 1)),
        recipe="tensor",
    )
    refused(
        ValueError,
        r"weight.scales \[40, 2\] do not fit .* by block they are \[1, 2\]",
        weight=dict(scales=ones(40, 2)),
        recipe="block",
    )
    refused(TypeError, r"x.scales is \[24, 1\] bfloat16.*float32", dict(scales=ones(24, 1).bfloat16()))
    refused(TypeError, r"weight.scales is \[40, 1\] float64.*float32", weight=dict(scales=ones(40, 1).double()))
    refused(TypeError, r"weight.scales must be a tensor on cpu, got NoneType", weight=dict(scales=None))
    refused(ValueError, r"recipe 'column' is not one of", dict(recipe="column"), dict(recipe="column"))
    refused(ValueError, r"x has scales by row, and weight by block: one recipe", weight=dict(recipe="block"))


def test_8_bit_operands_that_do_not_fit_are_quoted() -> None:
    zeros = torch.zeros
    refused(
        TypeError, r"weight.values is \[40, 256\] float8_e5m2", weight=dict(values=zeros(40, 256).to(torch.float8_e5m2))
    )
    refused(
        TypeError,
        r"x is a ScaledTensor and weight a Tensor: both are a weft.ScaledTensor",
        weight=zeros(40, 256).bfloat16(),
    )
    refused(
        TypeError,
        r"x is \[24, 256\] float8_e4m3fn.*in a weft.ScaledTensor",
        zeros(24, 256).to(E4M3),
        zeros(40, 256).to(E4M3),
    )
    refused(TypeError, r"out_dtype torch.float32", out_dtype=torch.float32)
    refused(TypeError, r"bias is \[40\] float16 on cpu, and the result torch.bfloat16", bias=zeros(40).half())
    x, w = dict(values=zeros(24, 208).to(E4M3)), dict(values=zeros(40, 208).to(E4M3))
    refused(ValueError, r"K 208 of x \[24, 208\].*multiple of 128, for scales by block", x, w, recipe="block")
    x, w = dict(values=zeros(24, 200).to(E4M3)), dict(values=zeros(40, 200).to(E4M3))
    refused(ValueError, r"K 200 .*must be a multiple of 16", x, w)
    refused(
        ValueError,
        r"N 41 .*must be a multiple of 8",
        weight=dict(values=zeros(41, 256).to(E4M3), scales=torch.ones(41)),
    )
    refused(ValueError, "requires a gradient", bias=zeros(40).bfloat16().requires_grad_())


@pytest.mark.parametrize(
    ("call", "instead"),
    [
        (lambda x, w, world: weft.matmul(x, w, x_scale=x, world=world), r"matmul: x_scale= is gone: pass weft.ScaledTensor\(x, x_scale"),
        (lambda x, w, world: weft.all_gather_matmul(x, w, weight_scale=x, world=world), r"weight_scale= is gone: pass weft.ScaledTensor\(w"),
        (lambda x, w, world: weft.all_gather_matmul(x, w, return_gathered=True, world=world), "call weft.all_gather_matmul_with_gathered"),
        (lambda x, w, world: weft.matmul_reduce_scatter(x, w, reorder=False, world=world), "call weft.matmul_reduce_scatter_tiles"),
        (lambda x, w, world: weft.matmul_all_reduce(x, w, reorder=False, world=world), "call weft.matmul_all_reduce_tiles"),
        (lambda x, w, world: weft.silu_mul(x, quantize="row", world=world), "call weft.silu_mul_quantized"),
        (lambda x, w, world: weft.all_reduce_rms_norm(x, None, w, quantize="row", world=world), "call weft.all_reduce_rms_norm_quantized"),
        (lambda x, w, world: weft.matmul(x, w, scales=x, world=world), r"matmul\(\) got an unexpected keyword argument 'scales'"),
    ],
)  # fmt: skip
def test_removed_keywords_name_their_replacement(call: Any, instead: str) -> None:
    def rank(world: weft.World) -> None:
        with pytest.raises(TypeError, match=instead):
            call(draw(0, 8, 16), draw(1, 16, 16), world)

    alone(rank)


def test_tiles_that_no_block_fits_run_the_library() -> None:
    def rank(world: weft.World) -> float:
        return matmul_case(world, 24, 40, 256, "block", Persistent(tile=GemmTile(16, 32, 64, 4, 2, 2)))

    assert alone(rank) < BF16


def test_a_gpu_without_8_bit_products_is_named() -> None:
    def rank(world: weft.World) -> None:
        world.backend.capability = 86
        with pytest.raises(weft.Unsupported, match=r"8-bit operands need compute capability 8.9, and this GPU has 8.6"):
            weft.matmul(*operands("row", world.device), world=world)

    alone(rank)


def test_16_bit_operands() -> None:
    def rank(world: weft.World) -> None:
        x, w = torch.randn(5, 24).bfloat16(), torch.randn(7, 24).bfloat16()
        actual = weft.matmul(x, w, world=world)
        world.synchronize()
        assert torch.equal(actual, x @ w.t())

    alone(rank)


ROUNDED = 5e-3  # a quotient halfway between two elements may round to either


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    m=st.integers(1, 40), k=st.integers(1, 20), scaling=st.sampled_from(SCALINGS), gated=st.booleans(),
    by_columns=st.booleans(), half=st.booleans(), seed=st.integers(0, 9),
)  # fmt: skip
def test_quantized_rows(m: int, k: int, scaling: str, gated: bool, by_columns: bool, half: bool, seed: int) -> None:
    options = dict(gated=gated, seed=seed, dtype=torch.float16 if half else torch.bfloat16)
    options |= dict(
        by_columns=by_columns and scaling == "block" and not gated, with_scale=scaling == "tensor" and gated
    )
    size = 128 * (k % 4 + 1) if scaling == "block" else 8 * k
    assert alone(lambda w: quantize_case(w, m, size, scaling, **options)) < ROUNDED


@pytest.mark.parametrize(
    ("m", "k", "weight"), [(3, 256, False), (1, 384, False), (40, 512, False), (300, 384, True), (129, 128, True)]
)
def test_scales_by_columns(m: int, k: int, weight: bool) -> None:
    """There are fewer rows than groups of columns, or more; in some cases, rows share the scales of a block."""
    assert alone(lambda w: quantize_case(w, m, k, "block", weight=weight, by_columns=True)) < ROUNDED


def test_nan_is_kept() -> None:
    """A NaN stays NaN whether the scale is given or computed, alone or after a norm; values beyond a given scale are
    clamped."""

    def main(world: weft.World) -> None:
        x = torch.ones(2, 128).bfloat16()
        x[0, 3], x[1, 5] = float("nan"), 1e5
        for recipe, scale in (("row", None), ("block", None), ("tensor", None), ("tensor", torch.ones(1))):
            values = weft.quantize(x, recipe, scale=scale, world=world).values.float()
            assert values[0, 3].isnan(), (recipe, scale)
            if (recipe, scale) != ("tensor", None):  # the scale of all elements is then NaN
                assert values[1, 5] == 448 and values.isnan().sum() == 1, (recipe, scale)
        for plan in ("sequential", "one_shot", "two_shot"):
            normed, _ = weft.all_reduce_rms_norm_quantized(
                x, None, torch.ones(128).bfloat16(), "tensor", scale=torch.ones(1), world=world, plan=plan
            )
            values = normed.values.float()
            assert values[0].isnan().all() and not values[1].isnan().any(), plan

    weft.spmd(main, 2, backend="emulated")


def test_no_column_to_quantize() -> None:
    def main(world: weft.World) -> None:
        values, scales, _ = weft.quantize(torch.empty(4, 0).bfloat16(), "tensor", world=world)
        assert values.shape == (4, 0) and scales.shape == (1,) and scales.isfinite().all()

    weft.spmd(main, 1, backend="emulated")


def test_weights_and_long_rows() -> None:
    """The cases are a weight of 300 rows in blocks of 128, a row that does not fit in a program's registers, a given
    scale, and rows of zeros."""
    assert alone(lambda w: quantize_case(w, 300, 384, "block", weight=True)) < ROUNDED
    for gated in (False, True):
        assert alone(lambda w, gated=gated: quantize_case(w, 2, 16384 + 520, "row", gated=gated)) < ROUNDED
    assert alone(lambda w: quantize_case(w, 5, 72, "tensor", with_scale=True)) < ROUNDED

    def zeros(world: weft.World) -> None:
        for recipe in SCALINGS:
            quantized, scales, _ = weft.quantize(torch.zeros(3, 256).bfloat16(), recipe, world=world)
            world.synchronize()
            assert not quantized.float().any() and scales.isfinite().all() and (scales > 0).all()
        assert weft.quantize(torch.zeros(0, 256).bfloat16(), "row", world=world)[1].shape == (0, 1)

    alone(zeros)


def test_unsupported_operands_of_quantize_are_quoted() -> None:
    def rank(world: weft.World) -> None:
        x, scale = torch.zeros(4, 200).bfloat16(), torch.ones(1)
        for error, match, call in (
            (ValueError, r"recipe 'column' is not one of", lambda: weft.quantize(x, "column", world=world)),
            (ValueError, r"200 columns .* not a multiple of 128", lambda: weft.quantize(x, "block", world=world)),
            (
                ValueError,
                r"a scale goes with recipe 'tensor'",
                lambda: weft.quantize(x, "row", scale=scale, world=world),
            ),
            (ValueError, r"a scale goes with", lambda: weft.silu_mul_quantized(x, "tensor", world=world)),
            (TypeError, r"float32 on cpu; bfloat16", lambda: weft.quantize(x.float(), "row", world=world)),
            (ValueError, r"scale \[2\]", lambda: weft.quantize(x, "tensor", scale=torch.ones(2), world=world)),
            (ValueError, "requires a gradient", lambda: weft.quantize(x.clone().requires_grad_(), "row", world=world)),
        ):
            with pytest.raises(error, match=match):
                call()

    alone(rank)


# -- around a GEMM -----------------------------------------------------------------------------------------------------
SUMMED = 5e-3  # error of sums of partial products that are themselves rounded to bfloat16


def errors(op: str, rows: Any, n: int, k: int, scaling: str, plan: str | Plan, seed: int = 0, **options: Any) -> float:
    return max(
        weft.spmd(lambda w: case(w, op, rows, n, k, scaling, plan, **options), len(rows), backend="emulated", seed=seed)
    )


@covered("(.*)-(decomposed|one_shot)-tensor", covering=r"[\1-\2-row]")
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("plan", ["sequential", "decomposed", "fused", "one_shot"])
@pytest.mark.parametrize("op", OPS)
def test_every_plan(op: str, plan: str, scaling: str) -> None:
    for i, rows in enumerate(([16, 16], [13, 13, 13], balanced_rows(35, 2))):
        assert errors(op, rows, 48, 256, scaling, plan, i, calls=2, bias=i == 1, fast=i == 2) < SUMMED
    assert errors(op, [9, 9], 40, 128, scaling, plan, 3, dtype=torch.float16, bias=True) < SUMMED / 8


@pytest.mark.parametrize("seed", some(range(6)))
@pytest.mark.parametrize("scaling", ["row", "block"])
def test_scales_travel_with_rows_under_many_schedules(scaling: str, seed: int) -> None:
    """Programs and copies pull whole-tile shards in bulk, shards with partial tiles, and empty shards."""
    op = OPS[0]
    for rows, plan in (
        ([16, 16], "fused"), ([20, 0, 12], "fused"), ([33, 5], FusedGather(tile=SMALL_TILE, pull_programs=4, pull_rows=8, pull_stages=2, split=2)),
        ([16, 16], FusedGatherByCopies(tile=SMALL_TILE)), ([13, 13], FusedGatherByCopies(tile=SMALL_TILE)),
    ):  # fmt: skip
        assert errors(op, rows, 40, 384, scaling, plan, seed, calls=3) < BF16


def test_ranks_that_disagree_on_the_recipe_raise() -> None:
    def rank(world: weft.World) -> None:
        x, w = operands("row" if world.rank else "tensor", world.device, 8, 16, 128)
        with pytest.raises(weft.Mismatch, match=r"rank 0: .*recipe=.*tensor.*rank 1: .*recipe=.*row"):
            weft.matmul_reduce_scatter(x, w, world=world)

    weft.spmd(rank, 2, backend="emulated")


@pytest.mark.parametrize("op", OPS)
def test_gradients_and_scales_that_do_not_fit_are_refused(op: str) -> None:
    def rank(world: weft.World) -> None:
        x, w = operands("row", world.device, 8, 16)
        bias = torch.zeros(16).bfloat16().requires_grad_()
        fn = getattr(weft, op)
        with pytest.raises(ValueError, match=rf"{op}.*gradient, which products of float8_e4m3fn do not have"):
            fn(x, w, bias, world=world)
        with pytest.raises(ValueError, match=rf"{op}: x.scales \[7, 1\] do not fit x.values \[8, 256\]"):
            fn(x._replace(scales=x.scales[:7]), w, world=world)
        with pytest.raises(TypeError, match=rf"{op}: out_dtype torch.float16 goes with x in float8_e4m3fn"):
            fn(x.values.bfloat16(), w.values.bfloat16(), out_dtype=torch.float16, world=world)

    weft.spmd(rank, 2, backend="emulated")


def test_a_plan_without_8_bit_products_is_named(caplog: pytest.LogCaptureFixture) -> None:
    assert errors(OPS[1], [16, 16], 40, 128, "row", "signaled") < SUMMED
    assert "sequential instead of signaled: its GEMM takes 16-bit operands" in caplog.text


@pytest.mark.parametrize("scaling", SCALINGS)
def test_promoted_tiles_that_are_short_of_rows(scaling: str) -> None:
    """The lower half of a tile, or a part of either half, is past the last row, and the scales of these rows are not
    read."""
    plan = Persistent(tile=GemmTile(32, 32, 128, 4, 3, 2), flatten=False)
    for m in (1, 15, 16, 17, 33, 63):
        assert alone(lambda w, m=m: matmul_case(w, m, 40, 384, scaling, plan, True, seed=m)) < BF16


def test_the_tiles_of_promoted_sums() -> None:
    """Tiles are 128 x 128, with two programs of four warps per SM, or with one program of eight warps next to the
    programs that sum over ranks."""
    for scaling in (Scaling("block"), Scaling("row", False)):
        for plan in (FusedGather(), FusedGatherByCopies(), FusedGather(tile=GemmTile(64, 256, 64, 4, 5))):
            fitted = with_scaled_tiles(plan, scaling)
            assert fitted.tile == GemmTile(128, 128, 128, 4, 3) and fitted.per_sm == 2 and not fitted.flatten
        assert with_scaled_tiles(FusedReduceScatter(), scaling).tile == GemmTile(128, 128, 128, 8, 4)
        assert block_rows(fitted.tile, scaling) == 64
    fast = with_scaled_tiles(FusedGather(), Scaling("row", True))
    assert fast == FusedGather(tile=GemmTile(block_k=128)) and block_rows(fast.tile, Scaling("row", True)) == 128


# -- which plan runs ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("op", OPS)
def test_auto_times_plans_at_the_first_call(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call times the tiles for 8-bit operands, even if the profile contains times for 16-bit operands;
    `explain` names the timed plans."""
    monkeypatch.setattr("weft.planner.auto._is_measured", lambda device: True)
    best = with_scaled_tiles(REGISTRY[op].variants[0], Scaling("block"))

    def time(self: Chooser, choice: Choice[Plan], plan: Plan, *_: Any) -> CallTime:
        return CallTime(*((50.0, 50.0) if plan == best else (100.0, 50.0)))

    monkeypatch.setattr(Chooser, "time", time)
    monkeypatch.setattr(EmulatedBackend, "clock", staticmethod(lambda *_: pytest.fail("really timed")))
    monkeypatch.setattr(Prepared, "__call__", lambda self, operands, out: self.plan)

    def rank(world: weft.World) -> Any:
        world.backend.name = "cuda"
        x, w, xs, ws = factors(1, 512, 512, 512, "block", world.device)
        options = {
            OPS[0]: (None, 0, False, "block", None, False),
            OPS[1]: (None, True, "block", None, False),
            OPS[2]: (True, "block", None, False),
        }[op]
        plan = REGISTRY[op].call(world, "auto", ScaledFactors(x, w, None, xs, ws), options, None)
        m = 1024 if op == OPS[0] else 512
        block_explanation = weft.explain(op, m, 512, 512, world=world, recipe="block")
        row_explanation = weft.explain(op, m, 512, 512, world=world, recipe="row")
        world.backend.name = "emulated"
        return plan, block_explanation, row_explanation

    plan, block_explanation, row_explanation = weft.spmd(rank, 2, backend="emulated", sm_count=132)[0]
    assert (
        plan == best == block_explanation.plan
        and "timed at the first call" in block_explanation.why
        and block_explanation.options[0].us == 50
    )
    assert (
        row_explanation.plan.kind == "sequential"
        and "no profile has rates" in row_explanation.why
        and not row_explanation.options
    )
    with pytest.raises(ValueError, match="recipe 'column' is not one of"):
        weft.explain(op, 512, 512, 512, world=2, recipe="column")


def test_a_simulation_of_8_bits_names_its_sources() -> None:
    from weft.planner.simulate import nvlink

    size = [(8192, 8192, 28672)]
    for op in ("matmul_reduce_scatter", "mlp"):
        half, wide = (weft.simulate(nvlink(8), op, size, profile="nvidia-h200-x4", eight_bits=e) for e in (True, False))
        assert "GEMMs not measured" in str(half) and "not measured" not in str(wide)
        assert half.rows[0].gemm < 0.7 * wide.rows[0].gemm and half.rows[0].speedup > wide.rows[0].speedup
        assert all(plan.kind != "signaled" for plan in half.rows[0].plans)


# -- modules -----------------------------------------------------------------------------------------------------------
MLP = {"gate_proj": (256, 256), "up_proj": (256, 256), "down_proj": (256, 256)}
NAMES = {"row": "weight_scale", "block": "weight_scale_inv"}
CLOSE = 0.08  # error of two successive GEMMs of e4m3 values, which have 3 mantissa bits


def checkpoint(recipe: str, by_tensor: bool = False) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return an MLP's checkpoint, and the values of its weights."""
    state, values = {}, {}
    for i, (name, shape) in enumerate(MLP.items()):
        w8, scale = scaled(draw(i, *shape) * 0.1, "tensor" if by_tensor else recipe, 128)
        state |= {f"{name}.weight": w8, f"{name}.{NAMES[recipe]}": scale, f"{name}.input_scale": torch.ones(1)}
        values[name] = dequantized(w8, scale, 128 if recipe == "block" else 1).double()
    return state, values


@pytest.mark.parametrize(("recipe", "by_tensor"), [("row", False), ("block", False), ("row", True)])
def test_an_mlp_of_a_checkpoint(recipe: str, by_tensor: bool) -> None:
    state, values = checkpoint(recipe, by_tensor)
    xs = [draw(9 + r, 8, 256) for r in range(2)]

    def rank(world: weft.World) -> float:
        mlp = weft.nn.ParallelMLP(256, 256, world=world, recipe=recipe)
        mlp.load_state_dict(state)
        y = mlp(xs[world.rank])
        again = mlp(weft.quantize(xs[world.rank], recipe, world=world))
        world.synchronize()
        assert torch.equal(y, again), "a quantized x must give the same result"
        full = weft.nn.full_state_dict(mlp)
        world.synchronize()
        for name, t in state.items():
            if "input" not in name and not (by_tensor and "scale" in name):
                assert torch.equal(full[name].float(), t.float()), name
        x = torch.cat(xs).double()
        hidden = torch.nn.functional.silu(x @ values["gate_proj"].t()) * (x @ values["up_proj"].t())
        return distance(y, (hidden @ values["down_proj"].t()).chunk(2)[world.rank])

    assert max(weft.spmd(rank, 2, backend="emulated")) < CLOSE


@pytest.mark.parametrize("recipe", ["row", "block"])
def test_linears_of_16_bit_ones_and_back(recipe: str) -> None:
    linear = torch.nn.Linear(256, 256, dtype=torch.bfloat16)
    xs = [draw(9 + r, 8, 256) for r in range(2)]

    def rank(world: weft.World) -> float:
        column = weft.nn.ColumnParallelLinear.from_linear(linear, world=world, recipe=recipe)
        row = weft.nn.RowParallelLinear.from_linear(linear, world=world, recipe=recipe)
        whole = weft.nn.RowParallelLinear.from_linear(linear, world=world, recipe=recipe, reduce="all")
        middle = column(xs[world.rank])
        y, z = row(middle), whole(middle)
        reloaded = weft.nn.RowParallelLinear(256, 256, world=world, recipe=recipe)
        reloaded.load_state_dict(row.state_dict())
        again = reloaded(middle)
        world.synchronize()
        assert torch.equal(again, y) and not any(p.requires_grad for p in row.parameters())
        with torch.no_grad():
            expected = linear.double()(linear.double()(torch.cat(xs).double()))
        return max(distance(y, expected.chunk(2)[world.rank]), distance(z, expected))

    assert max(weft.spmd(rank, 2, backend="emulated")) < CLOSE


@pytest.mark.parametrize("recipe", ["row", "block"])
def test_scales_of_columns_that_ranks_split_are_the_same(recipe: str) -> None:
    """Random weights, and 16-bit weights that are loaded, have a large element in one rank's columns. Together the
    ranks must multiply by the quantized unsharded weight."""
    weight = draw(3, 128, 256)
    weight[:, 200] *= 30

    def values(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return dequantized(weight, scale, 128 if recipe == "block" else 1)

    def rank(world: weft.World) -> float:
        torch.manual_seed(world.rank)
        row = weft.nn.RowParallelLinear(256, 128, world=world, bias=False, recipe=recipe)
        drawn = row.weight.clone()
        for loaded in (False, True):
            if loaded:
                row.load_state_dict({"weight": weight})
            full = weft.nn.full_state_dict(row)
            whole = values(full["weight"], full[NAMES[recipe]])
            own_columns = values(row.weight, row.get_shard(NAMES[recipe]))
            assert torch.equal(whole.chunk(2, 1)[world.rank], own_columns), f"loaded: {loaded}"
        assert drawn.float().abs().max() > 400 and not torch.equal(*world.exchange(drawn.float()))
        mlp = weft.nn.ParallelMLP(256, 256, world=world, recipe=recipe)
        mlp.load_state_dict({f"{name}.weight": draw(i, *shape) for i, (name, shape) in enumerate(MLP.items())})
        weft.nn.full_state_dict(mlp)
        world.synchronize()
        return distance(whole, weight.double())

    assert max(weft.spmd(rank, 2, backend="emulated")) < 0.04


def test_scales_that_cannot_be_those_of_all_ranks_are_refused() -> None:
    def rank(world: weft.World) -> None:
        row = weft.nn.RowParallelLinear(64, 16, world=world, bias=False, recipe="row")
        with pytest.raises(
            RuntimeError, match=r"weight: the scales .* from a 16-bit shard \[16, 32\] of one of 2 ranks"
        ):
            row.load_state_dict({"weight": draw(world.rank, 16, 32)}, strict=False)
        shard = row.state_dict()
        row.load_state_dict(shard)
        row.load_state_dict(shard | {"weight_scale": shard["weight_scale"] * (1 + world.rank)})
        with pytest.raises(ValueError, match=r"RowParallelLinear: weight_scale \[16, 1\] differs between ranks"):
            weft.nn.full_state_dict(row)

    weft.spmd(rank, 2, backend="emulated")


def test_modules_without_whole_blocks_are_refused() -> None:
    def rank(world: weft.World) -> None:
        with pytest.raises(ValueError, match=r"rank's weight \[64, 256\] is not of whole blocks of 128 x 128"):
            weft.nn.ColumnParallelLinear(256, 128, world=world, recipe="block")
        with pytest.raises(ValueError, match=r"recipe 'tensor' is not one of \['block', 'row'\]"):
            weft.nn.ParallelMLP(256, 256, world=world, recipe="tensor")
        linear = weft.nn.ColumnParallelLinear(256, 128, world=world, recipe="row")
        with pytest.raises(ValueError, match="gradient"):
            linear(draw(1, 4, 256).requires_grad_())

    weft.spmd(rank, 2, backend="emulated")


# -- decoders ----------------------------------------------------------------------------------------------------------
SMALL = dict(
    model_type="llama", vocab_size=64, hidden_size=256, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=4, head_dim=64, rms_norm_eps=1e-5, tie_word_embeddings=False, hidden_act="silu",
    max_position_embeddings=64, rope_theta=10000.0,
)  # fmt: skip


@pytest.mark.parametrize("recipe", ["row", "block"])
def test_a_decoder_of_a_checkpoint(recipe: str) -> None:
    """Every plan is compared with a decoder whose 16-bit weights equal the dequantized 8-bit weights."""
    from weft.models import Batch, Cache, Llama
    from weft.nn.weave import LayerPlan

    ids = torch.arange(12) % 64

    def rank(world: weft.World) -> float:
        wide, model = Llama(SMALL, world=world), Llama(SMALL, world=world, recipe=recipe)
        held = weft.nn.full_state_dict(wide)
        world.synchronize()
        eight, values = {}, {}
        for name, t in held.items():
            eight[name] = values[name] = t.cpu()
            if "proj.weight" in name:
                w8, scale = scaled(t.cpu(), recipe, 128)
                eight[name], eight[name.replace("weight", NAMES[recipe])] = w8, scale
                values[name] = dequantized(w8, scale, 128 if recipe == "block" else 1).bfloat16()
        wide.load_state_dict(values)
        model.load_state_dict(eight)

        def logits(decoder: Any, plan: str) -> torch.Tensor:
            cache = Cache(decoder.config, world=world, slots=1, max_len=32)
            y = decoder(ids, Batch.prefill([12]), cache, plan)
            world.synchronize()
            return y.clone()

        expected = logits(wide, "plain")
        with pytest.raises(ValueError, match="weights have 8 bits"):
            model.plan(LayerPlan("woven", sms=5), 12)
        return max(distance(logits(model, plan), expected) for plan in ("plain", "fused", "woven", "sequence"))

    assert max(weft.spmd(rank, 2, backend="emulated")) < 2 * CLOSE
