"""docs/reliability.md says what the results say, and names tests that there are."""

from __future__ import annotations

import re
from pathlib import Path

from chaos.page import PAGE, filled
from chaos.plan import What
from chaos.report import in_words, make_report
from chaos.run import Options, Result
from chaos.verdict import Counts, Times, Verdict

ROOT = PAGE.parents[1]


def _result(counts: Counts, mode: str = "multi+resume") -> Result:
    others: list[What] = ["hup"]
    options = Options(
        mode=mode,
        seconds=60,
        seed=1,
        roles=["router"],
        signals=["KILL"],
        others=others,
        clients=50,
        longest=600,
        end="term",
        engine=[],
    )
    times = {"router KILL": Times(detected=[0.01, 0.03], replaced=[0.4, 0.5], streams=[40, 50], ended=[0, 0])}
    return Result(options=options, verdict=Verdict(counts, [], {}, {}), times=times)


def test_page_is_what_the_results_say() -> None:
    page = PAGE.read_text()
    assert filled(page) == page


def test_page_is_filled_between_its_marks(tmp_path: Path) -> None:
    page = "before\n<!-- chaos: run -->\nold\n<!-- end -->\nafter\n"
    assert filled(page, tmp_path) == page.replace("old", "Not measured yet.")


def test_page_names_tests_that_there_are() -> None:
    page = PAGE.read_text()
    files = re.findall(r"tests/[\w/]+\.py", page)
    assert files
    assert [file for file in files if not (ROOT / file).is_file()] == []
    sources = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    names = re.findall(r"`(test_\w+)`", page)
    assert [name for name in names if f"def {name}(" not in sources] == []


def test_report_fails_for_what_must_not_be() -> None:
    assert make_report([_result(Counts(sent=10, answered=10))]).failures == []
    for counts in (Counts(lost=1), Counts(doubled=1), Counts(mismatched=1), Counts(failed_with_scheduler=1)):
        assert make_report([_result(counts)]).failures
    assert make_report([_result(Counts(failed_with_scheduler=1), "multi")]).failures == []
    late = _result(Counts())
    late.times["tokenizer_worker KILL"] = Times(replaced=[10.1])
    assert make_report([late]).failures
    left = _result(Counts())
    left.leftovers.append("address w1.1")
    assert make_report([left]).failures
    assert any("w1.1" in line for line in in_words(make_report([left])))
