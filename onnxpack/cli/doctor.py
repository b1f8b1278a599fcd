"""`onnxpack doctor`: what this machine has and lacks."""

from __future__ import annotations

import click


@click.command("doctor")
@click.option(
    "--require",
    type=click.Choice(["build", "run"]),
    multiple=True,
    help="Exit 5 when kernels cannot be built, or run, on this machine.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(require: tuple[str, ...], as_json: bool) -> None:
    """Say what is here for building kernels and for running them, what is missing, and the next step."""
    from dataclasses import asdict

    from onnxpack.cli.output import print_json
    from onnxpack.errors import EnvironmentFault
    from onnxpack.kernels.diagnosis import diagnose

    findings = diagnose()
    able = {part: not any(f.blocks for f in findings if f.part == part) for part in ("build", "run")}
    if as_json:
        print_json({"able": able, "findings": [asdict(finding) for finding in findings]})
    else:
        for part, title in (("build", "building kernels"), ("run", "running on the NPU"), ("cache", "cache")):
            click.echo(f"{title}: {'yes' if able[part] else 'no'}" if part in able else title)
            for finding in (f for f in findings if f.part == part):
                click.echo(f"  {finding.state:8}{finding.name}: {finding.detail}")
                if finding.blocks or finding.state == "note":
                    click.echo(f"          rule: {finding.rule}")
                    click.echo(f"          next: {finding.next_step}")
    lacking = [part for part in require if not able[part]]
    if lacking:
        first = next(f for f in findings if f.part == lacking[0] and f.blocks)
        raise EnvironmentFault(f"cannot {lacking[0]} kernels here: {first.name}: {first.detail}", hint=first.next_step)
