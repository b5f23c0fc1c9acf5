"""FP8 linears in the vLLM plugin are tested on stand-ins for vLLM's classes, in the emulator: the linears that weft's
operators replace, the equality of the results, and the linears that remain vLLM's own."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import weft
from tests.emulated.cases_fp8 import scaled, wanted
from tests.integrations import vllm_standin as standin
from tests.integrations.vllm_standin import (
    BF,
    CompressedTensorsLinearMethod,
    DecoderLayer,
    Fp8LinearMethod,
    Model,
    ScaledLayer,
)
from weft.integrations.vllm import fp8, plugin, row_all_reduce
from weft.integrations.vllm.row_norm_column import ROW_NORM_COLUMN, LayerTensors, RowNormColumn, ShardedTokens
from weft.plans import Sequential

IDS = torch.randint(0, 32, (24,), generator=torch.Generator().manual_seed(0))
METHODS: dict[str, Any] = {
    "tensor": Fp8LinearMethod,
    "row": CompressedTensorsLinearMethod,
    "block": lambda: Fp8LinearMethod("block"),
    "block, compressed-tensors": lambda: CompressedTensorsLinearMethod("block"),
}


@pytest.fixture(autouse=True)
def _served(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with standin.served_by_plugin(monkeypatch):
        monkeypatch.setenv(fp8.WEFT_VLLM_FP8, "1")
        for size in ("H", "INNER", "HEADS"):
            monkeypatch.setattr(standin, size, 256)  # two ranks have 128 columns of a row-parallel weight, a block
        yield


def model(method: Fp8LinearMethod, layer: Any = DecoderLayer) -> nn.Module:
    return standin.in_fp8(Model(layer), method)


def served(make: Any) -> tuple[nn.Module, str]:
    """Return the model that vLLM's loader returns, and the report."""
    loaded = standin.BaseModelLoader().load_model(vllm_config=standin.config(make), model_config=None)
    return loaded, plugin.models[-1].text()


def output(decoder: nn.Module, tokens: int = 24) -> Any:
    with torch.no_grad():
        return decoder(IDS[:tokens], torch.arange(tokens), None)


def in_form(monkeypatch: pytest.MonkeyPatch, sharded: bool) -> None:
    """Make twins run all passes with weft's own GEMMs, with sequence parallelism, or with vLLM's GEMMs."""
    form = ShardedTokens() if sharded else Sequential()
    monkeypatch.setattr(plugin, "untimed", lambda passes: [(1, passes.max_tokens, form)])


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def no_further(actual: torch.Tensor, expected: torch.Tensor, layer: Any = DecoderLayer) -> bool:
    """Return whether a result is as close to the 16-bit model as vLLM's result, and closer to vLLM's result than to
    that model. Different sums in bfloat16, even without weft's FP8 GEMMs, change how some elements are rounded to
    e4m3."""
    exact = standin.run(lambda world: output(Model(layer)))[0]
    return error(actual, exact) < 1.1 * error(expected, exact) and error(actual, expected) < 0.6 * error(
        expected, exact
    )


# -- a model -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_a_served_model_computes_what_it_did(monkeypatch: pytest.MonkeyPatch, method: str, sharded: bool) -> None:
    """The model runs vLLM's GEMMs or, for numbers of tokens that ranks share by rows, weft's overlapped GEMMs."""
    expected = standin.run(lambda world: output(model(METHODS[method]())))[0]
    in_form(monkeypatch, sharded)
    plugin.register()

    def main(world: weft.World) -> tuple[torch.Tensor, str]:
        decoder, _ = served(lambda: model(METHODS[method]()))
        return output(decoder), plugin.models[-1].text()

    results = standin.run(main)
    assert no_further(results[0][0], expected)
    text = results[0][1]
    assert "a row-parallel linear with its FP8 GEMM, residual and norm (4 times)" in text, text
    assert "the column-parallel FP8 GEMM after it (3 times)" in text and "leaves to vLLM" not in text, text
    assert ("calls decided, by sequence_parallel" in text) == sharded, text


def negate_in_place(linear: Any) -> None:
    """Negate weights as vLLM writes reloaded weights, which leaves the parameter's version unchanged."""
    version = linear.weight_scale._version
    linear.weight_scale.data.copy_(-linear.weight_scale)
    assert linear.weight_scale._version == version


def negate_in_new_parameters(linear: Any) -> None:
    with_weight(linear, linear.weight.t().clone().t())
    with_scales(linear, -linear.weight_scale)


def linears(decoder: nn.Module) -> list[Any]:
    return [module for module in decoder.modules() if hasattr(module, "weight_scale")]


RELOADS = {"in place": negate_in_place, "in new parameters": negate_in_new_parameters}


def reload_rows(decoder: Any, reload: Any) -> None:
    for layer in decoder.layers:
        reload(layer.self_attn.o_proj)
        reload(layer.mlp.down_proj)


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("reload", RELOADS)
def test_reloaded_scales_are_used(monkeypatch: pytest.MonkeyPatch, reload: str, sharded: bool) -> None:
    def reloaded(world: weft.World) -> torch.Tensor:
        decoder = model(METHODS["tensor"]())
        reload_rows(decoder, RELOADS[reload])
        return output(decoder)

    expected = standin.run(reloaded)[0]
    in_form(monkeypatch, sharded)
    plugin.register()

    def main(world: weft.World) -> tuple[torch.Tensor, torch.Tensor]:
        decoder, _ = served(lambda: model(METHODS["tensor"]()))
        before = output(decoder)
        reload_rows(decoder, RELOADS[reload])
        return before, output(decoder)

    before, after = standin.run(main)[0]
    assert error(before, expected) > 10 * error(after, expected)


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("layer", [DecoderLayer, ScaledLayer])
def test_operators_read_the_scales_of_the_linears(
    monkeypatch: pytest.MonkeyPatch, layer: Any, shape: tuple[int, ...]
) -> None:
    """The operators receive the scales unchanged, and a CUDA graph reads the scales that vLLM reloads in place."""
    addresses: dict[int, list[int]] = {}
    op = {DecoderLayer: RowNormColumn, ScaledLayer: row_all_reduce.RowAllReduce}[layer]
    call = op.call

    def recorded(self: Any, world: weft.World, plan: Any, operands: Any, *further: Any) -> Any:
        scales = [t for name, t in zip(op.operand_type._fields, operands, strict=True) if name.endswith("scale")]
        addresses.setdefault(world.rank, []).extend(t.data_ptr() for t in scales if t is not None)
        return call(self, world, plan, operands, *further)

    monkeypatch.setattr(op, "call", recorded)
    plugin.register()

    def make() -> nn.Module:
        decoder = model(METHODS["tensor"](), layer)
        for linear in linears(decoder):
            with_scales(linear, linear.weight_scale.view(shape))
        return decoder

    def main(world: weft.World) -> set[int]:
        decoder, _ = served(make)
        output(decoder)
        output(decoder)
        return {linear.weight_scale.data_ptr() for linear in linears(decoder)}

    of_linears = standin.run(main)
    assert len(addresses) == 2
    for rank, read in addresses.items():
        forward = read[: len(read) // 2]
        assert forward and read == forward * 2 and set(forward) <= of_linears[rank]


def test_sums_that_no_norm_reads() -> None:
    expected = standin.run(lambda world: output(model(METHODS["row"](), ScaledLayer)))[0]
    plugin.register()

    def main(world: weft.World) -> tuple[torch.Tensor, str]:
        decoder, text = served(lambda: model(METHODS["row"](), ScaledLayer))
        return output(decoder), text

    actual, text = standin.run(main)[0]
    assert "a row-parallel FP8 GEMM and its sum (4 times)" in text, text
    assert no_further(actual, expected, ScaledLayer)


def test_off_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless weft's FP8 is requested, the model is served like any quantised model, with vLLM's own GEMMs."""
    monkeypatch.delenv(fp8.WEFT_VLLM_FP8)
    expected = standin.run(lambda world: output(model(METHODS["row"]())))[0]
    plugin.register()

    def main(world: weft.World) -> tuple[torch.Tensor, str]:
        decoder, text = served(lambda: model(METHODS["row"]()))
        return output(decoder), text

    actual, text = standin.run(main)[0]
    assert "the sum of a row-parallel linear, residual and norm (4 times)" in text, text
    assert "GEMM" not in text and "leaves to vLLM" not in text, text
    assert no_further(actual, expected)


# -- what is refused ---------------------------------------------------------------------------------------------------
def with_scales(linear: Any, scale: torch.Tensor) -> None:
    linear.weight_scale = nn.Parameter(scale, requires_grad=False)


def with_weight(linear: Any, weight: torch.Tensor) -> None:
    linear.weight = nn.Parameter(weight, requires_grad=False)


LAYOUTS: dict[str, tuple[Any, str]] = {
    "static": (lambda linear: setattr(linear, "input_scale", torch.ones(())), "the scale of the input is static"),
    "blocks": (lambda linear: setattr(linear, "weight_block_size", [64, 128]), "scales are of blocks [64, 128]"),
    "16 bits": (lambda linear: with_weight(linear, linear.weight.to(BF)), "the weight is packed or padded"),
    "not transposed": (
        lambda linear: with_weight(linear, linear.weight.t().contiguous().t().contiguous()),
        "the weight is packed or padded",
    ),
    "padded": (
        lambda linear: with_weight(linear, torch.cat([linear.weight.t()] * 2).t()),
        "the weight is packed or padded",
    ),
    "scales of 16 bits": (
        lambda linear: with_scales(linear, linear.weight_scale.to(BF)),
        "the scales are packed or padded",
    ),
    "padded scales": (
        lambda linear: with_scales(linear, torch.cat([linear.weight_scale] * 2)),
        "the scales are packed or padded",
    ),
    "no scales": (lambda linear: delattr(linear, "weight_scale"), "the scales are packed or padded"),
    "no sizes": (lambda linear: delattr(linear, "input_size_per_partition"), "AttributeError: "),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_unknown_layout_stays_vllms(layout: str) -> None:
    change, why = LAYOUTS[layout]

    def make() -> nn.Module:
        decoder: Any = model(METHODS["row"]())
        for layer in decoder.layers:
            change(layer.self_attn.o_proj)
        return decoder

    plugin.register()
    text = standin.run(lambda world: served(make)[1])[0]
    assert f"leaves to vLLM the GEMM of 2 quantised linears: {why}" in text, text
    assert "the sum of a row-parallel linear, residual and norm (2 times)" in text, text
    assert "with its FP8 GEMM, residual and norm (2 times)" in text, text


def test_unsupported_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standin, "INNER", 144)
    plugin.register()
    text = standin.run(lambda world: served(lambda: model(METHODS["row"]()))[1])[0]
    assert "leaves to vLLM the GEMM of 2 quantised linears: N 256 and K 72 are no multiples of 8 and 16" in text, text


class OtherRounding(CompressedTensorsLinearMethod):
    """A method that quantises x with a single scale on the ranks in `on`."""

    def __init__(self, *on: int) -> None:
        super().__init__()
        self.on = on

    def quantized(self, x: torch.Tensor) -> torch.Tensor:
        x8, scale = scaled(x, "tensor" if standin.current_world().rank in self.on else "row")
        return x8.float() * scale


@pytest.mark.parametrize("on", [(0, 1), (1,)])
def test_another_product_stays_vllms(monkeypatch: pytest.MonkeyPatch, on: tuple[int, ...]) -> None:
    """If the result differs on any rank, every rank keeps vLLM's GEMM."""
    monkeypatch.setattr(sys.modules[FP8_PLACE], "Fp8LinearMethod", OtherRounding)
    plugin.register()

    def main(world: weft.World) -> tuple[torch.Tensor, str]:
        decoder, text = served(lambda: model(OtherRounding(*on)))
        return output(decoder), text

    results = standin.run(main)
    for actual, text in results:
        refused = re.findall(r"the GEMM of (\d) quantised linears: weft's product differs by \de-02 of its norm", text)
        assert sum(map(int, refused)) == 7, text
        assert "with its FP8 GEMM" not in text and "column-parallel" not in text, text
        assert "the sum of a row-parallel linear, residual and norm (4 times)" in text, text
        assert (actual == results[0][0]).all()
    assert no_further(results[0][0], standin.run(lambda world: output(model(OtherRounding(*on))))[0])


FP8_PLACE = "vllm.model_executor.layers.quantization.fp8"


def test_a_product_that_fails_stays_vllms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8, "own_product", lambda *_: 1 / 0)
    plugin.register()
    text = standin.run(lambda world: served(lambda: model(METHODS["row"]()))[1])[0]
    assert "the GEMM of 7 quantised linears: ZeroDivisionError: division by zero" in text, text


def test_a_version_without_the_method(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(sys.modules[FP8_PLACE], "Fp8LinearMethod")
    plugin.register()
    text = standin.run(lambda world: served(lambda: model(METHODS["tensor"]()))[1])[0]
    assert f"leaves to vLLM calls of {FP8_PLACE}.Fp8LinearMethod.apply: " in text, text
    assert "FP8 GEMM" not in text and "residual and norm (4 times)" in text, text


# -- operators ---------------------------------------------------------------------------------------------------------
M, K, N = 24, 128, 256


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return standin.drawn(seed, *shape).data


def weight(seed: int, n: int, k: int, recipe: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return an e4m3 weight, and its scales in the operators' layout."""
    elements, scale = scaled(drawn(seed, n, k), recipe, 128)
    return elements, scale if recipe == "block" else scale.view(-1)


def product(x: torch.Tensor, w: tuple[torch.Tensor, torch.Tensor], recipe: str) -> torch.Tensor:
    """Return the float64 product of x, quantised by the recipe, or by row if the weight has a single scale."""
    x8, x_scale = scaled(x, "row" if recipe == "tensor" else recipe)
    return wanted(x8, w[0], x_scale, w[1], recipe)


@pytest.mark.parametrize("plan", ["sequential", "own_rows", "sequence_parallel", "fused_sum", "woven"])
@pytest.mark.parametrize("recipe", ["tensor", "row", "block"])
def test_every_form_gives_the_same(plan: str, recipe: str) -> None:
    """The test uses weft's own GEMMs, because no linear layer of vLLM has such weights."""
    h = 256
    rows, columns = [[weight(seed + r, n, k, recipe) for r in range(2)] for seed, n, k in ((10, h, K), (20, N, h))]
    xs, residual, norm = [drawn(30 + r, M, K) for r in range(2)], drawn(40, M, h), 1 + drawn(41, h)

    def main(world: weft.World) -> torch.Tensor:
        (row, row_scale), (column, column_scale) = rows[world.rank], columns[world.rank]
        scales = dict(row_scale=row_scale, column_scale=column_scale)
        operands = LayerTensors(xs[world.rank], residual, norm, row=row, column=column, **scales)
        y, _ = ROW_NORM_COLUMN(world, plan, operands, (1e-6,))
        world.synchronize()
        return y

    total = residual.double() + sum(product(x, row, recipe) for x, row in zip(xs, rows, strict=True))
    normed = (torch.rms_norm(total, (h,), eps=1e-6) * norm).to(BF)
    for y, column in zip(standin.run(main), columns, strict=True):
        assert error(y, product(normed, column, recipe)) < 2e-2


@pytest.mark.parametrize("recipe", ["tensor", "row", "block"])
def test_a_gemm_under_its_own_sum(recipe: str) -> None:
    rows = [weight(r, N, K, recipe) for r in range(2)]
    xs, bias = [drawn(30 + r, M, K) for r in range(2)], drawn(5, N)

    def main(world: weft.World) -> torch.Tensor:
        elements, scale = rows[world.rank]
        y = row_all_reduce.ROW_ALL_REDUCE(world, "auto", (xs[world.rank], elements, bias, scale))
        world.synchronize()
        return y

    expected = bias.double() + sum(product(x, row, recipe) for x, row in zip(xs, rows, strict=True))
    assert all(error(y, expected) < 8e-3 for y in standin.run(main))


def test_wrong_scales_are_refused() -> None:
    def main(world: weft.World) -> None:
        elements, scale = weight(0, N, K, "row")
        x, norm = drawn(1, M, K), drawn(2, N)
        with pytest.raises(ValueError, match="row_scale .* must be \\[256\\]"):
            ROW_NORM_COLUMN(world, "auto", LayerTensors(x, None, norm, elements, row_scale=scale[1:]), (1e-6,))
        with pytest.raises(TypeError, match="row .* must be torch.float8_e4m3fn"):
            ROW_NORM_COLUMN(world, "auto", LayerTensors(x, None, norm, elements.to(BF), row_scale=scale), (1e-6,))
        with pytest.raises(ValueError, match="weight_scale .* must be \\[256\\]"):
            row_all_reduce.ROW_ALL_REDUCE(world, "auto", (x, elements, None, scale[1:]))

    standin.run(main)


def test_a_linear_with_another_weight_is_multiplied_by_weft() -> None:
    """The plugin records the addresses of the weights at loading; memory that was freed later may hold the weights of a
    different layer."""
    plugin.register()

    def main(world: weft.World) -> tuple[bool, bool]:
        decoder, _ = served(lambda: model(METHODS["row"]()))
        linear: Any = decoder.layers[0].self_attn.o_proj
        x, (elements, scale) = drawn(1, M, 128), fp8.weight_of(linear)
        linear.quant_method = Returning(torch.ones(M, 256, dtype=BF))
        before = fp8.product(world, x, elements, None, scale)
        linear.weight = nn.Parameter(linear.weight.t().clone().t(), requires_grad=False)
        after = fp8.product(world, x, elements, None, scale)
        world.synchronize()
        return bool((before == 1).all()), error(after, product(x, (elements, scale), "row")) < 8e-3

    assert standin.run(main) == [(True, True)] * 2


class Returning:
    def __init__(self, y: torch.Tensor) -> None:
        self.y = y

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return self.y


def test_torch_compile_follows_a_served_model() -> None:
    """The compiler produces one graph for any number of tokens, which stays valid after vLLM has reloaded weights in
    place."""
    plugin.register()

    def main(world: weft.World) -> list[torch.Tensor]:
        decoder, _ = served(lambda: model(METHODS["tensor"]()))
        twin = plugin.models[-1].passes.twin
        compiled = torch.compile(twin, backend="eager", fullgraph=True, dynamic=True)
        with torch.no_grad():
            outs = [compiled(IDS[:n].clone(), torch.arange(n), None) for n in (24, 7)]
            expected = [output(twin, n) for n in (24, 7)]
            reload_rows(decoder, negate_in_place)
            outs.append(compiled(IDS[:7].clone(), torch.arange(7), None))
        return [*outs, *expected, output(twin, 7)]

    outputs = standin.run(main)[0]
    assert all((a == b).all() for a, b in zip(outputs[:3], outputs[3:], strict=True))
    assert error(outputs[2], outputs[1]) > 0.1
