"""A page about a run of the h100 tests, from pytest's XML: python -m tests.gpu.report REPORT.xml > REPORT.md"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree


def page(xml: str) -> str:
    """Outcome, seconds and figures of every test, as markdown."""
    rows = []
    for case in ElementTree.fromstring(xml).iter("testcase"):
        outcome = next((kind for kind in ("failure", "error", "skipped") if case.find(kind) is not None), "passed")
        figures = ", ".join(f"{p.get('name')} {float(p.get('value', 'nan')):.4g}" for p in case.iter("property"))
        rows.append(f"| {case.get('name')} | {outcome} | {float(case.get('time', 0)):.1f} | {figures} |")
    head = ["# Tests on an H100", "", "| test | outcome | seconds | figures |", "|---|---|---|---|"]
    return "\n".join([*head, *rows, ""])


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as file:  # noqa: PTH123
        print(page(file.read()), end="")
