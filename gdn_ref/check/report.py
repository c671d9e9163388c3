"""A report as text, JSON, JUnit XML and HTML; all of them from the same findings."""

from __future__ import annotations

import datetime
import html
import math
import re
from xml.etree import ElementTree

import torch

import gdn_ref

from .cases import Recipe
from .records import BOUNDS, ERROR, FAIL, NOT_OFFERED, PASS, Finding, Measurement, Report

BAD = (FAIL, ERROR)


def plain(message: str) -> str:
    """The first line of what an exception said, without folders of this machine."""
    lines = message.strip().splitlines() or [""]
    return re.sub(r"(?:/[\w.+-]+)+/", "", lines[0])[:300]


def worst_text(m: Measurement | None) -> str:
    """Where the worst number was measured, and on what input."""
    return "" if m is None else f"{m.what}: {Recipe(**m.case).text()}"


def number(x: float) -> str:
    """Two digits; what is not finite by its name."""
    return f"{x:.1e}" if math.isfinite(x) else "inf"


# ---- text ------------------------------------------------------------------------------------------------------------


def summary(report: Report) -> str:
    """One line: how many passed, failed, are not offered."""
    if report.problem:
        return f"{report.name}: could not be loaded: {plain(report.problem)}"
    counts = [f"{report.count(PASS)} passed", f"{report.count(FAIL)} failed"]
    counts += [f"{report.count(ERROR)} raised"] if report.count(ERROR) else []
    counts += [f"{report.count(NOT_OFFERED)} not offered"]
    seconds = sum(f.seconds for f in report.findings)
    return f"{title(report)}: {', '.join(counts)}; {report.level}, {seconds:.0f} s"


def title(report: Report) -> str:
    """Name and version, and where it ran."""
    return f"{' '.join(filter(None, (report.name, report.version)))} on {report.device}"


def table(report: Report) -> str:
    """The findings as a text table; a failure takes further lines that say why the property matters and what failed."""
    if report.problem:
        return summary(report)
    lines = [title(report), f"{'property':<26}{'verdict':<8}{'error':>8}{'bound':>9}  worst case"]
    for f in report.findings:
        if f.verdict == NOT_OFFERED:
            continue
        numbers = f"{number(f.worst.error):>8}{number(f.worst.bound):>9}" if f.worst else " " * 17
        lines.append(f"{f.property.name:<26}{f.verdict:<8}{numbers}  {worst_text(f.worst)}")
        if f.verdict in BAD:
            lines += [f"{'':<26}{line}" for line in explain(f)]
    return "\n".join([*lines, *not_offered(report), summary(report)])


def not_offered(report: Report) -> list[str]:
    """What is not offered, by what the implementation lacks."""
    names: dict[str, list[str]] = {}
    for f in report.findings:
        if f.verdict == NOT_OFFERED:
            names.setdefault(plain(f.note), []).append(f.property.name)
    return [f"not offered ({why}): {'; '.join(lacking)}" for why, lacking in names.items()]


def explain(f: Finding) -> list[str]:
    """What stands under a failure: the reason of the property, its chapter, how many cases, what was raised."""
    lines = [f"{f.property.reason} ({f.property.chapter})", f"{f.failures} of {f.cases} measurements are out of bounds"]
    return lines + ([f"it said: {plain(f.note)}"] if f.note else [])


# ---- JSON ------------------------------------------------------------------------------------------------------------


def document(reports: list[Report]) -> dict:
    """Everything, for `--json`. A number that is not finite is null."""
    return {
        "gdn_ref": gdn_ref.__version__,
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
        "bounds": {dtype: bound._asdict() for dtype, bound in BOUNDS.items()},
        "reports": [_report(r) for r in reports],
    }


def _report(r: Report) -> dict:
    head = {"name": r.name, "version": r.version, "device": r.device, "level": r.level, "ok": r.ok}
    counts = {"passed": r.count(PASS), "failed": r.count(FAIL), "raised": r.count(ERROR),
              "not_offered": r.count(NOT_OFFERED)}  # fmt: skip
    problem = {"problem": plain(r.problem)} if r.problem else {}
    return head | counts | problem | {"findings": [_finding(f) for f in r.findings]}


def _finding(f: Finding) -> dict:
    found = {"property": f.property.name, "reason": f.property.reason, "chapter": f.property.chapter,
             "verdict": f.verdict, "cases": f.cases, "failures": f.failures}  # fmt: skip
    found |= {"note": plain(f.note)} if f.note else {}
    found |= {"worst": _measurement(f.worst)} if f.worst else {}
    return found | ({"failed": [_measurement(m) for m in f.failed]} if f.failed else {})


def _measurement(m: Measurement) -> dict:
    error = float(f"{m.error:.3g}") if math.isfinite(m.error) else None
    said = {"message": plain(m.message)} if m.message else {}
    return {"error": error, "bound": float(f"{m.bound:.3g}"), "where": m.what, "input": m.case, **said}


# ---- JUnit -----------------------------------------------------------------------------------------------------------


def junit(reports: list[Report]) -> str:
    """XML that test dashboards read: a suite an implementation, a case a property, "not offered" as skipped."""
    root = ElementTree.Element("testsuites", name="gdn_ref check")
    for r in reports:
        suite = ElementTree.SubElement(root, "testsuite", name=r.name, tests=str(max(len(r.findings), bool(r.problem))),
                                       failures=str(r.count(FAIL)), errors=str(r.count(ERROR) + bool(r.problem)),
                                       skipped=str(r.count(NOT_OFFERED)))  # fmt: skip
        if r.problem:
            case = ElementTree.SubElement(suite, "testcase", classname=r.name, name="load")
            ElementTree.SubElement(case, "error", message=_legal(plain(r.problem)))
        for f in r.findings:
            case = ElementTree.SubElement(suite, "testcase", classname=r.name, name=f.property.name,
                                          time=f"{f.seconds:.3f}")  # fmt: skip
            kind = {FAIL: "failure", ERROR: "error", NOT_OFFERED: "skipped"}.get(f.verdict)
            if kind:
                said = f.note if f.verdict != FAIL else f"{number(f.worst.error)} > {number(f.worst.bound)}"
                inner = ElementTree.SubElement(case, kind, message=_legal(plain(said)))
                inner.text = _legal(worst_text(f.worst))
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _legal(text: str) -> str:
    """Without the control characters that XML forbids."""
    return re.sub(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "?", text)


# ---- HTML ------------------------------------------------------------------------------------------------------------

STYLE = """
:root { color-scheme: light dark }
body { font: 15px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 75em; padding: 0 1em }
table { border-collapse: collapse; width: 100% }
.wide { overflow-x: auto; margin: 1em 0 2em }
th, td { text-align: left; vertical-align: top; padding: .35em .7em; border-bottom: 1px solid #8884 }
td.n { font-variant-numeric: tabular-nums; white-space: nowrap }
td small { opacity: .75 }
.pass b { color: light-dark(#00664a, #4fd0a6) }
.bad b { color: light-dark(#a83200, #ff9b6b) }
.off b { opacity: .6; font-weight: normal }
"""


def page(reports: list[Report]) -> str:
    """One HTML file that needs no other."""
    parts = [_section(r) for r in reports]
    return (f'<!DOCTYPE html>\n<html lang="en"><meta charset="utf-8"><title>gdn_ref check</title>\n'
            f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style>\n'
            f"<h1>gdn_ref check</h1>\n<p>gdn_ref {gdn_ref.__version__}, torch {html.escape(torch.__version__)}, "
            f"{datetime.date.today().isoformat()}. Errors are relative L2 against the float64 token recurrence, of "
            f"the worst sequence and head.</p>\n{''.join(parts)}</html>\n")  # fmt: skip


def _section(r: Report) -> str:
    head = f"<h2>{html.escape(r.name)}</h2>\n<p>{html.escape(summary(r))}</p>\n"
    if r.problem:
        return head
    rows = "".join(_row(f) for f in r.findings)
    columns = "".join(f"<th>{c}</th>" for c in ("property", "verdict", "error", "bound", "worst case"))
    return f'{head}<div class="wide"><table><tr>{columns}</tr>\n{rows}</table></div>\n'


def _row(f: Finding) -> str:
    kind = "pass" if f.verdict == PASS else "bad" if f.verdict in BAD else "off"
    where = html.escape("; ".join(filter(None, (worst_text(f.worst), plain(f.note)))))
    error, bound = (number(f.worst.error), number(f.worst.bound)) if f.worst and kind != "off" else ("", "")
    chapter = html.escape(f.property.chapter)
    return (f'<tr class="{kind}"><td>{html.escape(f.property.name)}<br><small>{html.escape(f.property.reason)}; '
            f'<a href="{chapter}">{chapter}</a></small></td><td><b>{f.verdict}</b></td>'
            f'<td class="n">{error}</td><td class="n">{bound}</td><td>{where}</td></tr>\n')  # fmt: skip
