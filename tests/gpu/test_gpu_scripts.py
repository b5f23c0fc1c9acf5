"""Run the scripts in gpu/ with a torchrun that only records its command line. Every step starts once with arguments
that its program accepts, and the next call repeats the steps that failed or were interrupted.
"""

from __future__ import annotations

import importlib
import itertools
import multiprocessing
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import weft
from bench.measure import predictions
from tests.gpu import gpu_main, gpu_run
from weft import launch

ROOT = Path(__file__).parents[2]
# Both scripts record their arguments. For the module that $ENDS names, torchrun evaluates the command after the
# module's name.
TORCHRUN = """#!/bin/sh
shift 2
echo "$@" >> "$ASKED"
out=$(echo "$@" | sed -n "s/.*--out \\([^ ]*\\).*/\\1/p")
case "$2" in
  weft.planner.tune) echo '{}' > "$out"; echo "$out: 7 of 7 measurements" ;;
  bench.measure.run) mkdir -p "$out"; echo '{"times": {}}' > "$out/sweep.jsonl"; echo '{}' > "$out/matmul_all_reduce.jsonl" ;;
esac
case "$ENDS" in "$2 "*) eval "${ENDS#* }" ;; esac
"""
PYTHON = """#!/bin/sh
case "$2" in
  tests.gpu.gpu_run)
    echo "$@" >> "$ASKED"
    out=$(echo "$@" | sed -n "s/.*--out \\([^ ]*\\).*/\\1/p")
    echo '{}' > "$out/results.json"
    echo "0 passed, 0 failed, 0 random calls wrong; nothing is left" ;;
  tests.* | bench.*) echo "$@" >> "$ASKED" ;;
  *) echo 132 ;;
esac
"""


def run(tree: Path, out: Path, script: str = "measure.sh", **variables: str) -> tuple[int, str, list[list[str]]]:
    """Run a script in a separate tree, since it writes the profile to src. Return the exit status, the output, and the
    command lines that the script started."""
    programs = {"nvidia-smi": "#!/bin/sh\necho GPU 0\necho GPU 1\n", "python3": PYTHON, "torchrun": TORCHRUN}
    (tree / "bin").mkdir(parents=True, exist_ok=True)
    for name, text in programs.items():
        (tree / "bin" / name).write_text(text)
        (tree / "bin" / name).chmod(0o755)
    (tree / "src/weft/planner/profiles").mkdir(parents=True, exist_ok=True)
    shutil.copytree(ROOT / "gpu", tree / "gpu", dirs_exist_ok=True, ignore=shutil.ignore_patterns("out"))
    asked = tree / "asked"
    asked.write_text("")
    env = os.environ | {
        "PATH": f"{tree / 'bin'}:{os.environ['PATH']}",
        "OUT": str(out),
        "ASKED": str(asked),
        "ENDS": "",
    }
    done = subprocess.run(["bash", tree / "gpu" / script], env=env | variables, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr, [line.split() for line in asked.read_text().splitlines()]


class Parsed(Exception):
    """Raised when a program has parsed its arguments."""


def is_parsed(words: list[str], monkeypatch: pytest.MonkeyPatch) -> bool:
    """Return whether the program `-m MODULE ..` accepts these arguments and their values."""

    def parsed(*args: object, **options: object) -> None:
        raise Parsed

    module = importlib.import_module(words[1])
    for owner, name in (
        (weft, "init"),
        (launch, "init"),
        (predictions, "profile_for"),
        (multiprocessing, "get_context"),
    ):
        monkeypatch.setattr(owner, name, parsed)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(sys, "argv", words[1:])
    with pytest.raises((Parsed, SystemExit)) as ended:
        module.main()
    return ended.type is Parsed


def test_every_step_is_taken_by_its_program_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = dict(
        PARTS="profile ops norm eager decoder signaled moe attention columns transformers fp8 vllm", MINUTES="30"
    )
    code, printed, asked = run(tmp_path / "tree", tmp_path / "out", **parts)
    assert code == 0 and "left" not in printed, printed
    for words in asked:
        assert is_parsed(words, monkeypatch), words
    modules = {words[1].rpartition(".")[2] for words in asked}
    assert modules >= {
        "tune",
        "run",
        "decoder",
        "moe",
        "moe_stragglers",
        "moe_timeline",
        "attention",
        "hf_moe",
        "fp8_ranks",
        "vllm_serving",
    }
    assert run(tmp_path / "tree", tmp_path / "out", **parts)[::2] == (0, [])


def test_interrupted_steps_continue_and_failed_ones_come_last(tmp_path: Path) -> None:
    tree, out, parts = tmp_path / "tree", tmp_path / "out", dict(PARTS="norm columns fp8")
    assert run(tree, out, **parts, ENDS="bench.measure.norm exit 3")[0] == 1
    (out / "state/columns").unlink()
    code, printed, asked = run(tree, out, **parts, ENDS="bench.measure.moe_tensor echo '2 cases left: a, b'")
    assert [words[1] for words in asked] == [
        "bench.measure.moe_tensor",
        "bench.measure.moe_tensor",
        "bench.measure.norm",
    ]
    assert code == 1 and printed.splitlines()[-1] == "left: columns (cut)"
    code, printed, asked = run(tree, out, **parts)
    assert code == 0 and [words[1] for words in asked] == ["bench.measure.moe_tensor"]


def test_steps_that_are_one_run_begin_again(tmp_path: Path) -> None:
    """The table for the decoder has sizes that only one run has measured."""
    kept = tmp_path / "out/decoder"
    kept.mkdir(parents=True)
    run(tmp_path / "tree", tmp_path / "out", PARTS="decoder")
    assert not kept.exists()


def test_eight_checks_first_and_continues(tmp_path: Path) -> None:
    """One call runs all steps on two GPUs. The next call finds the checks' results in the record and has no remaining
    steps."""
    tree, out = tmp_path / "tree", tmp_path / "out"
    code, printed, asked = run(tree, out, "eight.sh", MINUTES="30")
    assert code == 0 and "left:" not in printed, printed
    checks, *measured, _, fuzz = [words for words in asked if words[1] != "bench.measure.vllm_serving"]
    assert after(checks, "--parts") == ["checks", "peers", "users"] and after(checks, "--ranks") == ["2"]
    assert after(fuzz, "--parts") == ["fuzz"] and float(after(fuzz, "--fuzz-seconds")[0]) > 600
    assert {words[0] for words in measured} == {"-m"} and asked[-1][1] == "bench.measure.vllm_serving"
    assert run(tree, out, "eight.sh", MINUTES="30")[::2] == (0, [])


def test_eight_names_skipped_steps(tmp_path: Path) -> None:
    code, printed, asked = run(tmp_path / "tree", tmp_path / "out", "eight.sh", MINUTES="1")
    assert (code, asked) == (1, []) and printed.splitlines() == [
        "left: checks", "left: measure", "left: fuzz", "left: vllm",
    ]  # fmt: skip


def script_of(words: list[str]) -> Path:
    """Return the file that `-m MODULE ..` or `FILE ..` runs."""
    if words[0] != "-m":
        return ROOT / words[0]
    return ROOT / ("src" if words[1].startswith("weft.") else "") / f"{words[1].replace('.', '/')}.py"


def has_options(words: list[str]) -> None:
    script = script_of(words)
    text = script.read_text()
    for option in (word for word in words if word.startswith("--")):
        assert f'"{option}"' in text, f"{script}: {option}"


def test_checks_start_with_options_that_they_have(tmp_path: Path) -> None:
    """The driver accepts run.sh's arguments, and the other checks accept the driver's arguments."""
    asked = dict(RANKS="2 8", ONLY="moe attention", MINUTES="3", FUZZ_SECONDS="5", FUZZ_CALLS="99", SEED="7")
    code, printed, (words,) = run(tmp_path / "tree", tmp_path / "out", "run.sh", PARTS="checks fuzz", **asked)
    assert code == 0, printed
    has_options(words)
    assert after(words, "--parts") == ["checks", "fuzz"] and after(words, "--ranks") == ["2", "8"]
    assert after(words, "--only") == ["moe", "attention"] and after(words, "--minutes") == ["3"]
    assert [*after(words, "--fuzz-seconds"), *after(words, "--fuzz-calls"), *after(words, "--seed")] == ["5", "99", "7"]
    checks = [gpu_run.checks_of(4, ["moe"], alone).words for alone in (False, True)]
    started = [c.words for c in gpu_run.commands(["peers", "users", "fuzz"], [2, 4, 8], 60, 100, 7)]
    for words in [[*words, "--queue", "--name", "--out", "--seconds"] for words in checks] + [
        list(words) for words in started
    ]:
        scripts = [i for i, word in enumerate(words) if word.startswith(("tests.", "examples"))]
        begin = scripts[0] - (not words[scripts[0]].startswith("examples")) if scripts else 0
        has_options(words[begin:] if scripts else [__file__])


def test_every_check_is_made_by_one_kind_of_group() -> None:
    """Some groups run the checks that need the GPU's memory, one at a time; other groups run the checks that can share
    a GPU."""
    commands = [gpu_run.checks_of(2, [], alone).words for alone in (False, True)]
    asked = [(after(list(words), "--only") or [""], after(list(words), "--without")) for words in commands]
    for name in weft.spmd(names_of_checks, 2, backend="emulated")[0]:
        assert sum(gpu_main.wanted(name, *options) for options in asked) == 1, name


def after(words: list[str], option: str) -> list[str]:
    """Return an option's arguments, up to the next option."""
    rest = words[words.index(option) + 1 :] if option in words else []
    return list(itertools.takewhile(lambda word: not word.startswith("--"), rest))


def names_of_checks(world: weft.World) -> list[str]:
    return [name for name, _, _ in gpu_main.checks(world)]


def test_results_and_tuning_are_kept_apart(tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(tmp_path / "tree", out, PARTS="ops")
    assert [p.name for p in (out / "results").iterdir()] == ["matmul_all_reduce.jsonl"]  # the report reads these files
    assert [p.name for p in (out / "tuning").iterdir()] == ["sweep.jsonl"]


def test_the_profile_is_used_while_the_rest_is_measured(tmp_path: Path) -> None:
    """src does not change, because its hash identifies the version that was checked."""
    out, profiles = tmp_path / "out", tmp_path / "tree/src/weft/planner/profiles"
    run(
        tmp_path / "tree",
        out,
        PARTS="profile norm",
        ENDS='bench.measure.norm cp -r src/weft/planner/profiles "$OUT/seen"',
    )
    assert [p.name for p in (out / "seen").iterdir()] == ["132-x2.json"] and not list(profiles.iterdir())


def test_a_profile_in_part_replaces_none(tmp_path: Path) -> None:
    tree, out, shipped = tmp_path / "tree", tmp_path / "out", tmp_path / "tree/src/weft/planner/profiles/132-x2.json"
    for path, text in ((shipped, "shipped"), (out / "profile/132-x2.json", "measured")):
        path.parent.mkdir(parents=True)
        path.write_text(text)
    used = 'bench.measure.norm cp src/weft/planner/profiles/132-x2.json "$OUT/used"'
    for state, text in (("cut", "shipped"), ("done", "measured")):
        (out / "state").mkdir(exist_ok=True)
        (out / "state/profile").write_text(state)
        (out / "state/norm").unlink(missing_ok=True)
        run(tree, out, PARTS="norm", ENDS=used)
        assert (out / "used").read_text() == text and shipped.read_text() == "shipped"


def test_only_experts_see_the_libraries_beside_them(tmp_path: Path) -> None:
    """vLLM's folder contains other packages too."""
    for part, module in (("moe", "moe_stragglers"), ("norm", "norm")):
        ends = f'bench.measure.{module} echo "$PYTHONPATH" > "$OUT/{part}"'
        run(tmp_path / "tree", tmp_path / "out", PARTS=part, ENDS=ends, AT_VLLM="/there/vllm", AT_QUACK="/there/quack")
    assert "/there/quack/nvidia_cutlass_dsl/dsl_packages:/there/vllm" in (tmp_path / "out/moe").read_text()
    assert "/there" not in (tmp_path / "out/norm").read_text()


def test_an_unknown_part_is_an_error(tmp_path: Path) -> None:
    assert run(tmp_path / "tree", tmp_path / "out", PARTS="norms")[0] == 1
