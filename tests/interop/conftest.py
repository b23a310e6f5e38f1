"""Prints the table of ``test_table`` at the end."""

from typing import Any


def pytest_terminal_summary(terminalreporter: Any) -> None:
    found = [
        value
        for reports in terminalreporter.stats.values()
        for report in reports
        for name, value in getattr(report, "user_properties", ())
        if name == "table" and report.when == "call"
    ]
    if found:
        terminalreporter.section("each row once per epoch, and a resumed training equal to the whole one")
    for trainer, cells in sorted(found, key=lambda each: str(each[0])):
        loaders: dict[str, list[str]] = {}
        for cell, wrong in cells.items():
            loader, case = cell.split(": ")
            loaders.setdefault(loader, []).append(f"{case} {f'WRONG ({wrong})' if wrong else 'ok'}")
        for loader, cases in loaders.items():
            terminalreporter.write_line(f"{trainer + ', ' + loader:45} {', '.join(cases)}")
