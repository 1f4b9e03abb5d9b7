"""`snapcask check`: whether an image is for this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from snapcask.commands.options import (
    facts_option,
    json_option,
    override_option,
    quiet_option,
    store_option,
)

if TYPE_CHECKING:
    from imgfmt.compat import Check
    from restore.compat import CompatReport

_WIDEST = 48
"""Characters of a value in the table; --json has all."""


@click.command()
@click.argument("reference", metavar="REF")
@store_option
@click.option("--member", metavar="NAME", help="Look at what is recorded of this member only.")
@facts_option("A fact of this machine, before what is found here.")
@override_option
@json_option
@quiet_option
def command(
    reference: str,
    store: str,
    member: str | None,
    facts: tuple[tuple[str, str], ...],
    override: tuple[str, ...],
    as_json: bool,
    quiet: bool,
) -> None:
    """Say whether the image REF is for this machine: each rule, both values and the verdict.

    Of variants, says which one a pull takes here. What is not known refuses nothing. Ends with code
    11 if a rule differs that is not overridden. Reads no chunk.
    """
    from snapcask import api, render
    from snapcask.exitcodes import ExitCode

    report = api.check(reference, store=store, member=member, facts=dict(facts), override=override)
    if as_json:
        render.print_json(_document(reference, report))
    elif not quiet:
        render.print_lines(_lines(reference, report))
    if not report.fits:
        click.get_current_context().exit(ExitCode.MISMATCH)


def _document(reference: str, report: CompatReport) -> dict[str, Any]:
    return {
        "reference": reference,
        "digest": str(report.digest),
        "fits": report.fits,
        "variant": report.variant,
        "n_variants": report.n_variants,
        "rules": [_row(check) for check in report.checks],
        "rejected": [
            {"digest": str(one.digest), "rules": [_row(check) for check in one.checks]}
            for one in report.rejected
        ],
    }


def _row(check: Check) -> dict[str, Any]:
    return {
        "rule": check.rule,
        "op": check.op.value,
        "source": check.source,
        "target": check.target,
        "verdict": check.verdict.value,
        "missing": list(check.missing),
        "overridden": check.overridden,
        "origin": check.origin.value,
        "members": list(check.members),
    }


def _lines(reference: str, report: CompatReport) -> list[str]:
    from snapcask import render

    chosen = str(report.digest)
    if report.variant is not None:
        fits = "the first that fits" if report.fits else "none fits, this is the preferred one"
        chosen += f" ({report.variant} of {report.n_variants} variants: {fits})"
    lines = render.facts([("image", reference), ("digest", chosen)])
    lines += [
        f"not {one.digest.short}: {render.sentence('; '.join(map(str, one.checks)))}"
        for one in report.rejected
    ]
    rows = [
        (
            check.rule,
            f"{check.op} {_short(check.source)}",
            "-" if check.target is None else _short(check.target),
            _told(check),
        )
        for check in report.checks
    ]
    if rows:
        lines += ["", *render.table(("RULE", "IMAGE", "HERE", "VERDICT"), rows)]
    else:
        lines += ["", "the image has no rules: it is for every machine"]
    return [*lines, "", _verdict(report)]


def _told(check: Check) -> str:
    lacks = f": lacks {_short(','.join(check.missing))}" if check.missing else ""
    return check.verdict.value + (", overridden" if check.overridden else "") + lacks


def _verdict(report: CompatReport) -> str:
    if report.fits:
        unknown = sum(check.verdict == "unknown" for check in report.checks)
        return "it fits this machine" + (f"; {unknown} not known" if unknown else "")
    differing = ", ".join(sorted({check.rule for check in report.refusing}))
    return f"it does not fit this machine: {differing}; --override RULE lets a rule differ"


def _short(value: str) -> str:
    from snapcask.render import sentence

    text = sentence(value)
    return text if len(text) <= _WIDEST else text[: _WIDEST - 3] + "..."
