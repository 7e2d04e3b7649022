"""Measure fedshot beside its peers, on the same work, in one interleaved run.

    python benchmarks/run.py                     everything: results.json and the pages in docs
    python benchmarks/run.py --only flower/      cases whose names hold this, put into those results
    python benchmarks/run.py --quick             next to no work: does everything run?
    python benchmarks/run.py --list              the names of the cases

Peers other than the ordinary simulator need `make bench-peers`; without it they are left out, and
the results say so. `--quick` writes below runs/ instead.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import answers
import decoupled
import episodes
import exchange
import memory
import meta
import robust
import rounds
import steps
import tests_at_server
import texts
from case import Options, Result, UnequalError
from report import front, pages

from fedshot.core.machine import keep_freed_memory
from fedshot.recipes import provenance

ROOT = Path(__file__).resolve().parent.parent
CASES = [
    *rounds.CASES, *meta.CASES, *decoupled.CASES, *episodes.CASES, *tests_at_server.CASES,
    *steps.CASES, *exchange.CASES, *memory.CASES, *robust.CASES, *answers.CASES, *texts.CASES,
]  # fmt: skip


def main() -> int:
    """Run the cases and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", metavar="CASE", help="the case of this name, else all that hold it"
    )
    parser.add_argument("--repeats", type=int, help="turns of each case; 9 by default, 2 if quick")
    parser.add_argument("--quick", action="store_true", help="next to no work")
    parser.add_argument("--list", action="store_true", help="print the names of the cases")
    arguments = parser.parse_args()
    chosen = [case for case in CASES if case.name == arguments.only]
    chosen = chosen or [case for case in CASES if (arguments.only or "") in case.name]
    if arguments.list or not chosen:
        print("\n".join(case.name for case in CASES))
        return 0 if arguments.list else 2
    keep_freed_memory()  # as every run of fedshot does
    repeats = arguments.repeats or (2 if arguments.quick else 9)
    results, docs = _targets(arguments.quick)
    held = _held(results) if arguments.only else {}
    bad = 0
    for case in chosen:
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            try:
                found = case.run(Options(repeats, arguments.quick, Path(folder)))
            except UnequalError as error:
                found, bad = Result(case.name, left_out={"all": str(error)}), 1
        held[case.name] = asdict(found) | _source(repeats)
        print(f"{case.name}: {time.perf_counter() - start:.0f} s", flush=True)
        for who, why in found.left_out.items():
            print(f"  left out: {who}: {why}", flush=True)
        _write(held, results, docs)
    return bad


def _targets(quick: bool) -> tuple[Path, Path]:
    if not quick:
        return ROOT / "benchmarks" / "results.json", ROOT / "docs"
    folder = ROOT / "runs" / "benchmarks-quick"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / "results.json", folder


def _source(repeats: int) -> dict[str, Any]:
    return {
        "repeats": repeats,
        "machine": "".join(provenance.kinds([{"machine": provenance.machine()}])),
        "commit": provenance.revision(),
        "command": "python benchmarks/run.py",
    }


def _held(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    cases: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["cases"]
    return cases


def _write(held: dict[str, Any], results: Path, docs: Path) -> None:
    order = [case.name for case in CASES]
    found = {"cases": {name: held[name] for name in order if name in held}}
    results.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    shares = (ROOT / "benchmarks" / "kernel_shares.md").read_text(encoding="utf-8")
    (docs / "benchmarks").mkdir(exist_ok=True)
    (docs / "benchmarks.md").write_text(front(found), encoding="utf-8")
    for name, text in pages(found, shares).items():
        (docs / "benchmarks" / f"{name}.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
