"""`benchmarks/coverage.py --markdown` keeps the section that the census writes."""

from script import ROOT, script

coverage = script("benchmarks/coverage.py")


def test_the_section_of_the_census_is_kept() -> None:
    page = (ROOT / "docs" / "coverage.md").read_text(encoding="utf-8")
    kept = coverage.kept_section(page)
    assert kept.startswith("\n## Models of other packages\n") and kept.endswith("<!-- end of census -->\n")
    assert page.endswith(kept) and "Below 95%" not in kept
    assert coverage.kept_section("# A page without a census\n") == ""
