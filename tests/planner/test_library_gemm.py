"""The rule that chooses a GEMM library, with simulated libraries and times. tests/gpu/gpu_main.py runs the rule on
GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata
from typing import Any

import pytest
import torch

from tests.emulated.cases_fp8 import factors
from weft.backends import library_gemm
from weft.chooser import Choice, Chooser
from weft.integrations import quack
from weft.scaled_tensor import E4M3, ScaledTensor
from weft.timing import CallTime


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    quack.lacks.cache_clear()
    Chooser.alone.trials.clear()
    yield
    quack.lacks.cache_clear()
    Chooser.alone.trials.clear()


@pytest.mark.parametrize(
    ("version", "says"),
    [(None, "not installed"), ("0.6.4", "not one of"), ("0.7.0", "not one of"), ("0.7.0rc1", "not one of"), ("0.6.5", "Hopper"), ("0.6.12", "Hopper")],
)  # fmt: skip
def test_other_versions_are_named_and_not_used(version: str | None, says: str, monkeypatch: Any) -> None:
    def installed_version(package: str) -> str:
        assert package == "quack-kernels"
        if version is None:
            raise metadata.PackageNotFoundError(package)
        return version

    monkeypatch.setattr(metadata, "version", installed_version)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    reason = quack.lacks()
    assert reason is not None and says in reason
    assert version is None or says == "Hopper" or version in reason


def test_a_library_that_fails_to_import_is_named(monkeypatch: Any) -> None:
    monkeypatch.setattr(metadata, "version", lambda package: "0.6.5")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *a: (9, 0))
    monkeypatch.setitem(__import__("sys").modules, "quack", None)
    assert "cannot be imported" in (quack.lacks() or "")


def operands() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x, w = torch.randn(16, 8).bfloat16(), torch.randn(24, 8).bfloat16()
    return x, w, torch.empty(16, 24, dtype=torch.bfloat16)


def test_without_it_the_product_is_torchs() -> None:
    x, w, out = operands()
    library_gemm.linear(x, w, None, out)
    assert torch.equal(out, torch.mm(x, w.t()))


def right(x: torch.Tensor, w: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    return out.copy_(x @ w.t())


def wrong(x: torch.Tensor, w: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    return out.fill_(1)


def broken(x: torch.Tensor, w: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("no kernel of this form")


@pytest.mark.parametrize(
    ("us", "takes"),
    [(50.0, right), (99.0, library_gemm.cublas), (150.0, library_gemm.cublas)],
    ids=["faster", "hardly", "slower"],
)
def test_the_fastest_that_is_right_and_worth_it(us: float, takes: Any, monkeypatch: Any) -> None:
    took = {library_gemm.cublas: 100.0, right: us, wrong: 1.0, broken: 1.0}
    monkeypatch.setattr(quack, "FORMS", (right, wrong, broken))
    monkeypatch.setattr(quack, "product", lambda product: product)
    monkeypatch.setattr(Chooser.alone, "time", lambda choice, product, *_: CallTime(took[product], 500.0))
    monkeypatch.setattr(Chooser.alone, "capturing", lambda: False)
    assert library_gemm.fastest(library_gemm.cublas, *operands()) is takes


def test_a_size_is_measured_once_and_never_in_a_capture(monkeypatch: Any) -> None:
    counted: list[Any] = []

    def time(choice: Choice[Any], product: Any, times: int, ahead: float) -> CallTime:
        counted.append(product)
        return CallTime(50.0 if product is right else 100.0, 1.0)

    def captures(capturing: bool) -> None:
        monkeypatch.setattr(Chooser.alone, "capturing", lambda: capturing)

    def candidates(library: Any, operands: Any) -> list[Any]:
        assert not Chooser.alone.capturing(), "candidates read values on the host, which no capture allows"
        return [library, right]

    monkeypatch.setattr(library_gemm, "correct_products", candidates)
    monkeypatch.setattr(Chooser.alone, "time", time)
    x, w, out = operands()
    captures(True)
    assert library_gemm.fastest(library_gemm.cublas, x, w, out) is library_gemm.cublas and not counted
    captures(False)
    assert library_gemm.fastest(library_gemm.cublas, x, w, out) is right
    timed = len(counted)
    captures(True)
    assert library_gemm.fastest(library_gemm.cublas, x, w, out) is right and len(counted) == timed
    assert library_gemm.fastest(library_gemm.cublas, x[:, :4], w[:, :4], out) is library_gemm.cublas, (
        "operands that are not contiguous run with cuBLAS"
    )
    assert library_gemm.fastest(library_gemm.cublas, x[:0], w, out[:0]) is library_gemm.cublas


def test_serving_measures_few_sizes() -> None:
    sizes = {library_gemm.stepped(m) for m in range(1, 4097)}
    assert len(sizes) < 90
    assert all(m <= library_gemm.stepped(m) <= 1.13 * m for m in range(8, 4097))


def test_an_engine_makes_one_trial_an_octave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library_gemm, "_steps_an_octave", 8)
    library_gemm.one_trial_per_power_of_two()
    assert {library_gemm.stepped(m) for m in range(1, 4097)} == {1 << i for i in range(13)}
    assert all(m <= library_gemm.stepped(m) < 2 * m for m in range(1, 4097))


STARTS = torch.tensor([0, 5, 5, 12], dtype=torch.int32)  # three groups, one of them empty, and four rows after them


def of_groups(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = torch.full((len(x), w.shape[1]), 9.0).bfloat16()
    for group in range(len(w)):
        rows = slice(*STARTS[group : group + 2].tolist())
        y[rows] = x[rows] @ w[group].t()
    return y


@pytest.mark.parametrize(("us", "library"), [(50.0, "quack"), (99.0, "torch")], ids=["faster", "hardly"])
def test_groups_by_the_faster_library(us: float, library: str, monkeypatch: Any) -> None:
    """quack receives the groups' first rows, and rows after the last group are not compared."""
    ran: list[str] = []

    def gemm(x: Any, w: Any, out: Any, c: Any, ticket: Any, *tile: int, pingpong: bool, cu_seqlens_m: Any) -> None:
        assert cu_seqlens_m is STARTS
        ran.append("quack")
        out[:12] = of_groups(x, w)[:12]

    def grouped_mm(x: torch.Tensor, w: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        assert torch.equal(offs, STARTS[1:])
        ran.append("torch")
        return of_groups(x, w.transpose(1, 2))

    def time(choice: Choice[Any], product: Any, times: int, ahead: float) -> CallTime:
        ran.clear()
        choice.run(product)
        return CallTime(us if ran == ["quack"] else 100.0, 500.0)

    module = type("Module", (), {"gemm": staticmethod(gemm)})
    monkeypatch.setitem(__import__("sys").modules, "quack", module)
    monkeypatch.setitem(__import__("sys").modules, "quack.gemm", module)
    monkeypatch.setattr(torch, "_grouped_mm", grouped_mm)
    monkeypatch.setattr(Chooser.alone, "capturing", lambda: False)
    monkeypatch.setattr(Chooser.alone, "time", time)
    x, w = torch.randn(16, 8).bfloat16(), torch.randn(3, 24, 8).bfloat16()
    for lacks in ("not installed", None):
        monkeypatch.setattr(quack, "lacks", lambda lacks=lacks: lacks)
        ran.clear()
        y = library_gemm.multiply_groups(x, w, STARTS)
        assert torch.equal(y[:12], of_groups(x, w)[:12])
        assert ran[-1] == ("torch" if lacks else library)
    library_gemm.multiply_groups(x, w.transpose(1, 2).contiguous().transpose(1, 2), STARTS)
    assert ran[-1] == "torch", "weights that are not contiguous run with torch"


def test_the_fastest_scaled_product_that_is_right(monkeypatch: Any) -> None:
    """The first GEMM runs without a check, unless a different GEMM is right and faster."""

    def way(name: str, value: float) -> Any:
        def run() -> None:
            if name == "broken":
                raise RuntimeError("no kernel of this size")
            out.fill_(value)

        return run

    out, us = torch.empty(4, 4), {"own": 10.0, "slow": 11.0, "fast": 9.0}
    monkeypatch.setattr(Chooser, "time", lambda self, choice, name, *_: CallTime(us[name], us[name]))
    chooser = Chooser(lambda *_: pytest.fail("really timed"), lambda: False)

    def fastest(**values: float) -> str:
        ways = {name: way(name, value) for name, value in values.items()}
        candidates = lambda: library_gemm.correct_names(ways, out)  # noqa: E731
        return chooser.choose(Choice(tuple(values), lambda mode: "own", candidates, lambda name: ways[name]()))

    assert fastest(own=2.0, slow=2.0, wrong=3.0, broken=2.0) == "own"
    assert fastest(own=2.0, slow=2.0, wrong=3.0, broken=2.0, fast=2.001) == "fast"


def test_a_dequantized_product_is_that_of_the_values() -> None:
    x, w, xs, ws = factors(1, 24, 300, 256, "block", torch.device("cpu"))
    out, bias = torch.empty(24, 300, dtype=torch.bfloat16), torch.randn(300).bfloat16()
    operands = library_gemm.ScaledOperands(ScaledTensor(x, xs, "block"), ScaledTensor(w, ws, "block"), bias, False)
    library_gemm.dequantized_product(operands, out)
    rows, columns = (
        s.repeat_interleave(n, 0)[:m].repeat_interleave(128, 1) for s, n, m in ((xs, 1, 24), (ws, 128, 300))
    )
    expected = (x.double() * rows) @ (w.double() * columns).t() + bias.double()
    assert ((out.double() - expected).norm() / expected.norm()).item() < 3e-3


@pytest.mark.skipif(not hasattr(torch.ops.aten._scaled_mm_v2, "out"), reason="an older torch")
def test_torch_accepts_the_arguments_of_a_product_by_block() -> None:
    """CPUs support no GEMM with this recipe. torch receives all arguments, and the error comes from torch."""
    x, weight = (
        ScaledTensor(torch.zeros(rows, 640).to(E4M3), torch.ones(scales, 5), "block")
        for rows, scales in ((64, 64), (256, 2))
    )
    operands = library_gemm.ScaledOperands(x, weight, None, False)
    with pytest.raises((ValueError, RuntimeError), match="Invalid scaling configuration"):
        library_gemm.torch_scaled_by_block(operands, torch.empty(64, 256, dtype=torch.bfloat16))
