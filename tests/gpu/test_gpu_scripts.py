"""The scripts in gpu/ with a torchrun that only writes down what it was asked: every part starts, with options that its
script has."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from pathlib import Path

import weft
from tests.gpu import gpu_main, gpu_run

ROOT = Path(__file__).parents[2]
TORCHRUN = """#!/bin/sh
while [ "${1#--m}" != "$1" ] || [ "${1#--n}" != "$1" ]; do shift 2; done
echo "$@"
out=$(echo "$@" | sed -n "s/.*--out \\([^ ]*\\).*/\\1/p")
case "$2" in
  weft.planner.tune) echo '{}' > "$out"; echo "$out: 7 of 7 measurements" ;;
  bench.measure.run) mkdir -p "$out"; echo '{"times": {}}' > "$out/sweep.jsonl"; echo '{}' > "$out/matmul_all_reduce.jsonl" ;;
esac
"""
PYTHON = """#!/bin/sh
case "$2" in
  tests.*) echo "$@" > "$OUT/asked" ;;
  *) echo 132 ;;
esac
"""


def run(tree: Path, out: Path, script: str = "measure.sh", **variables: str) -> subprocess.CompletedProcess[str]:
    """In a tree of its own, since the script puts the profile into src."""
    programs = {
        "nvidia-smi": "#!/bin/sh\necho GPU 0\necho GPU 1\n",
        "python3": PYTHON,
        "torchrun": TORCHRUN,
    }
    (tree / "bin").mkdir(parents=True, exist_ok=True)
    for name, text in programs.items():
        (tree / "bin" / name).write_text(text)
        (tree / "bin" / name).chmod(0o755)
    (tree / "src/weft/planner/profiles").mkdir(parents=True, exist_ok=True)
    shutil.copytree(ROOT / "gpu", tree / "gpu", dirs_exist_ok=True, ignore=shutil.ignore_patterns("out"))
    env = os.environ | {"PATH": f"{tree / 'bin'}:{os.environ['PATH']}", "OUT": str(out), "SECONDS_OF": "5"} | variables
    return subprocess.run(["bash", tree / "gpu" / script], env=env, capture_output=True, text=True)


def test_every_part_starts_with_options_that_it_has(tmp_path: Path) -> None:
    done = run(tmp_path / "tree", tmp_path / "out")
    assert done.returncode == 0, done.stdout + done.stderr
    logs = {path.stem: path.read_text().splitlines()[0].split() for path in (tmp_path / "out").glob("*.log")}
    assert set(logs) == {"profile", "predictions", "ops", "norm", "decoder", "signaled-gemm", "signaled-ops"}
    for words in logs.values():
        has_options(words)


def script_of(words: list[str]) -> Path:
    """The file that `-m MODULE ..` or `FILE ..` runs."""
    if words[0] != "-m":
        return ROOT / words[0]
    return ROOT / ("src" if words[1].startswith("weft.") else "") / f"{words[1].replace('.', '/')}.py"


def has_options(words: list[str]) -> None:
    script = script_of(words)
    text = script.read_text()
    for option in (word for word in words if word.startswith("--")):
        assert f'"{option}"' in text, f"{script}: {option}"


def test_checks_start_with_options_that_they_have(tmp_path: Path) -> None:
    """What run.sh gives to the driver, and that to the rest."""
    asked = dict(RANKS="2 8", ONLY="moe attention", MINUTES="3", FUZZ_SECONDS="5", FUZZ_CALLS="99", SEED="7")
    done = run(tmp_path / "tree", tmp_path / "out", "run.sh", PARTS="checks bench fuzz", **asked)
    assert done.returncode == 0, done.stdout + done.stderr
    has_options((tmp_path / "out/bench.log").read_text().split())
    words = (tmp_path / "out/asked").read_text().split()
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
    """Those that need the GPU's memory alone, the rest beside each other."""
    commands = [gpu_run.checks_of(2, [], alone).words for alone in (False, True)]
    asked = [(after(list(words), "--only") or [""], after(list(words), "--without")) for words in commands]
    for name in weft.spmd(names_of_checks, 2, backend="emulated")[0]:
        assert sum(gpu_main.wanted(name, *options) for options in asked) == 1, name


def after(words: list[str], option: str) -> list[str]:
    """What follows an option, up to the next."""
    rest = words[words.index(option) + 1 :] if option in words else []
    return list(itertools.takewhile(lambda word: not word.startswith("--"), rest))


def names_of_checks(world: weft.World) -> list[str]:
    return [name for name, _, _ in gpu_main.checks(world)]


def test_what_goes_elsewhere_is_kept_apart(tmp_path: Path) -> None:
    out, profiles = tmp_path / "out", tmp_path / "tree/src/weft/planner/profiles"
    run(tmp_path / "tree", out)
    assert [p.name for p in (out / "results").iterdir()] == ["matmul_all_reduce.jsonl"]  # what the report reads
    assert [p.name for p in (out / "tuning").iterdir()] == ["sweep.jsonl"]
    assert [p.name for p in profiles.iterdir()] == ["132-x2.json"]


def test_a_part_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    assert run(tmp_path / "tree", tmp_path / "out", PARTS="norms").returncode == 1
