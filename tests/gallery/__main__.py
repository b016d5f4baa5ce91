"""Compute the gallery and compare it with committed digests, or with another commit on this machine.

python -m tests.gallery [NAME ...]                   compare with the digests committed for this environment
python -m tests.gallery --write [NAME ...]           write the digests of the rows that the suite runs
python -m tests.gallery --against COMMIT [NAME ...]  compare with the rows of another commit, computed here
NAME is the beginning of the names of rows: "fp8 native", "int8".
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m tests.gallery", description="Compute the gallery and compare it.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="beginnings of the names of rows; default: all")
    parser.add_argument("--against", metavar="COMMIT", help="compare with the rows of this commit, computed here")
    parser.add_argument("--write", action="store_true", help="write the digests of this environment")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes that compute rows")
    parser.add_argument("--worker", type=int, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    if not options.against and not options.names:
        from tests.gallery import rows

        options.names = rows.suite()
    if options.worker:
        return _work(*options.worker, options.names)
    found = _compute(ROOT, options)
    from tests.gallery import rows

    if options.write:
        rows.write(found)
        print(f"{len(found)} rows written for {rows.environment()}")
        return 0
    if options.against:
        with tempfile.TemporaryDirectory() as folder:
            tree = Path(folder) / "tree"
            subprocess.run(["git", "worktree", "add", "--detach", tree, options.against], cwd=ROOT, check=True)
            try:
                shutil.copytree(HERE, tree / "tests/gallery", dirs_exist_ok=True)
                expected = _compute(tree, options)
            finally:
                subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=ROOT, check=True)
    else:
        expected = rows.committed()
        if expected is None:
            print(f"no digests are committed for {rows.environment()}; --against COMMIT computes them")
            return 2
    return _compare(found, expected)


def _compare(found: dict[str, Any], expected: dict[str, Any]) -> int:
    differ = 0
    for name, row in found.items():
        if name not in expected:
            print(f"new      {name}")
        elif row != expected[name]:
            differ += 1
            before = expected[name]
            changes = [f"{key} {before.get(key)} -> {new}" for key, new in row.items() if before.get(key) != new]
            print(f"differs  {name}: {', '.join(changes)}")
    known = sum(name in expected for name in found)
    print(f"{known} rows, {known - differ} equal to the bit, {differ} differ; {len(found) - known} new")
    return int(differ > 0)


def _compute(tree: Path, options: Any) -> dict[str, Any]:
    """Compute rows of a checkout in several processes, each of which computes a share."""

    def run(share: int) -> dict[str, Any]:
        command = [sys.executable, "-m", "tests.gallery", "--worker", str(share), str(options.jobs), *options.names]
        environment = {**os.environ, "PYTHONPATH": str(tree), "JAX_PLATFORMS": "cpu"}
        out = subprocess.run(command, cwd=tree, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
        return json.loads(out.splitlines()[-1])

    with ThreadPoolExecutor(options.jobs) as pool:
        found = {name: row for part in pool.map(run, range(options.jobs)) for name, row in part.items()}
    from tests.gallery import rows

    return {name: found[name] for name in rows.names() if name in found}


def _work(share: int, jobs: int, names: list[str]) -> int:
    import jax

    from tests.gallery import rows

    jax.config.update("jax_disable_most_optimizations", True)
    wanted = [name for name in rows.names() if not names or name.startswith(tuple(names))][share::jobs]
    found = {}
    for name in wanted:
        print(name, file=sys.stderr, flush=True)
        found[name] = rows.attempt(name)
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
