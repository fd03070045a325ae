"""The page about the tests on an H100 says what happened."""

from __future__ import annotations

from tests.gpu.report import page

XML = """<testsuites><testsuite>
<testcase name="test_speed" time="2.04"><properties><property name="mfu" value="0.41234"/></properties></testcase>
<testcase name="test_fp8[x]" time="1"><failure message="no"/></testcase>
<testcase name="test_two" time="0"><skipped message="one GPU"/></testcase>
</testsuite></testsuites>"""


def test_outcomes_and_figures_are_told():
    lines = page(XML).splitlines()
    assert "| test_speed | passed | 2.0 | mfu 0.4123 |" in lines
    assert "| test_fp8[x] | failure | 1.0 |  |" in lines and "| test_two | skipped | 0.0 |  |" in lines
