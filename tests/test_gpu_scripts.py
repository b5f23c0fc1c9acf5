"""The scripts in gpu/ with a torchrun that only writes down what it was asked: every part starts, with options that its
script has."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from pathlib import Path

import gpu_main

import weft

ROOT = Path(__file__).parent.parent
TORCHRUN = """#!/bin/sh
while [ "${1#--m}" != "$1" ] || [ "${1#--n}" != "$1" ]; do shift 2; done
echo "$@"
out=$(echo "$@" | sed -n "s/.*--out \\([^ ]*\\).*/\\1/p")
case "$1" in
  -m) echo '{}' > "$out"; echo "$out: 7 of 7 measurements" ;;
  bench/run.py) mkdir -p "$out"; echo '{"times": {}}' > "$out/sweep.jsonl"; echo '{}' > "$out/matmul_all_reduce.jsonl" ;;
esac
"""


def run(tree: Path, out: Path, script: str = "measure.sh", **more: str) -> subprocess.CompletedProcess[str]:
    """In a tree of its own, since the script puts the profile into src."""
    programs = {
        "nvidia-smi": "#!/bin/sh\necho GPU 0\necho GPU 1\n",
        "python3": "#!/bin/sh\necho 132\n",
        "torchrun": TORCHRUN,
    }
    (tree / "bin").mkdir(parents=True, exist_ok=True)
    for name, text in programs.items():
        (tree / "bin" / name).write_text(text)
        (tree / "bin" / name).chmod(0o755)
    (tree / "src/weft/planner/profiles").mkdir(parents=True, exist_ok=True)
    shutil.copytree(ROOT / "gpu", tree / "gpu", dirs_exist_ok=True, ignore=shutil.ignore_patterns("out"))
    env = os.environ | {"PATH": f"{tree / 'bin'}:{os.environ['PATH']}", "OUT": str(out), "SECONDS_OF": "5"} | more
    return subprocess.run(["bash", tree / "gpu" / script], env=env, capture_output=True, text=True)


def test_every_part_starts_with_options_that_it_has(tmp_path: Path) -> None:
    done = run(tmp_path / "tree", tmp_path / "out")
    assert done.returncode == 0, done.stdout + done.stderr
    logs = {path.stem: path.read_text().splitlines()[0].split() for path in (tmp_path / "out").glob("*.log")}
    assert set(logs) == {"profile", "predictions", "ops", "norm", "decoder", "signaled-gemm", "signaled-ops"}
    for words in logs.values():
        has_options(words)


def has_options(words: list[str]) -> None:
    script = ROOT / ("src/weft/planner/tune.py" if words[:2] == ["-m", "weft.planner.tune"] else words[0])
    text = script.read_text()
    for option in (word for word in words if word.startswith("--")):
        assert f'"{option}"' in text, f"{script}: {option}"


def test_checks_start_with_options_that_they_have_and_time_for_all_of_them(tmp_path: Path) -> None:
    """On two GPUs; of each part what it left is said at the end."""
    done = run(tmp_path / "tree", out := tmp_path / "out", "run.sh", FUZZ_SECONDS="0")
    assert done.returncode == 0, done.stdout + done.stderr
    logs = {path.stem: [line.split() for line in path.read_text().splitlines()] for path in out.glob("*.log")}
    parts = {"world2-ops", "world2-experts", "world2-gradients", "world2-decoders", "world2-models"}
    assert set(logs) == parts | {"stalled", "killed", "late", "disagree", "loopback", "users", "bench"}
    for words in (*logs["stalled"], *(logs[part][0] for part in parts), *logs["late"], *logs["disagree"], *logs["bench"]):
        has_options(words)
    each = [logs[part][0] for part in parts]
    assert len({words[words.index("--out") + 1] for words in each}) == len(parts)
    told = [(after(words, "--only") or [""], after(words, "--without")) for words in each]
    for name in weft.spmd(names_of_checks, 2, backend="emulated")[0]:
        assert sum(gpu_main.wanted(name, *of) for of in told) == 1, name
    assert [words[-1] for words in logs["stalled"]] == ["all_gather_matmul", "one_shot", "moe_exchange", "awaiting"]
    assert all(f"== {out / name}.log" in done.stdout for name in set(logs) - {"bench"})


def after(words: list[str], option: str) -> list[str]:
    """What follows an option, up to the next."""
    found = words[words.index(option) + 1 :] if option in words else []
    return list(itertools.takewhile(lambda word: not word.startswith("--"), found))


def names_of_checks(world: weft.World) -> list[str]:
    return [name for name, _, _ in gpu_main.checks(world)]


def test_random_calls_start_on_the_gpus_that_are_there(tmp_path: Path) -> None:
    """Two of them; what an earlier run left is gone."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "fuzz4.json").write_text("{}")
    done = run(tmp_path / "tree", out, "fuzz.sh", FUZZ_SECONDS="5", SEED="7")
    assert done.returncode == 0 and [p.name for p in out.iterdir()] == ["fuzz2.log"], done.stdout + done.stderr
    words = (out / "fuzz2.log").read_text().split()
    assert words[0] == "tests/gpu_fuzz.py" and words[-2:] == ["--seed", "7"]
    has_options(words)
    assert run(tmp_path / "tree", out, "fuzz.sh", FUZZ_SECONDS="0").returncode == 0 and not list(out.glob("*.json"))


def test_what_goes_elsewhere_is_kept_apart(tmp_path: Path) -> None:
    out, profiles = tmp_path / "out", tmp_path / "tree/src/weft/planner/profiles"
    run(tmp_path / "tree", out)
    assert [p.name for p in (out / "results").iterdir()] == ["matmul_all_reduce.jsonl"]  # what the report reads
    assert [p.name for p in (out / "tuning").iterdir()] == ["sweep.jsonl"]
    assert [p.name for p in profiles.iterdir()] == ["132-x2.json"]


def test_a_part_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    assert run(tmp_path / "tree", tmp_path / "out", PARTS="norms").returncode == 1
