"""The container file: Debian and Python packages, the installed program, nothing else."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping

from tests.deploy.chart import ROOT, Rendered, container

_TEXT = (ROOT / "deploy" / "container" / "Containerfile").read_text()
_PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def _instructions() -> list[tuple[str, str]]:
    lines = re.sub(r"^\s*#.*\n", "", _TEXT, flags=re.MULTILINE).replace("\\\n", " ")
    words = [line.split(maxsplit=1) for line in lines.splitlines() if line.strip()]
    return [(word[0], " ".join(word[1].split())) for word in words]


def _all(name: str) -> list[str]:
    return [rest for word, rest in _instructions() if word == name]


def test_it_begins_with_debian_alone() -> None:
    assert [found.split(" AS ")[0] for found in _all("FROM")] == ["${BASE}", "${BASE}"]
    (base,) = [found for found in _all("ARG") if found.startswith("BASE=")]
    assert re.fullmatch(r"BASE=docker\.io/library/debian:[a-z0-9.]+-slim", base)


def test_it_installs_with_apt_and_pip_alone() -> None:
    for line in _all("RUN"):
        for step in line.split(" && "):
            program = step.split()[0]
            assert program in ("apt-get", "rm", "python3", "/opt/snapcask/bin/pip"), step
    assert _all("ADD") == []
    assert "://" not in _TEXT


def test_the_project_is_installed_whole_and_not_editable() -> None:
    (install,) = [
        step for line in _all("RUN") for step in line.split(" && ") if "pip install" in step
    ]
    assert install.endswith('".[${EXTRAS}]"')
    assert not {"-e", "--editable"} & set(install.split())
    copied = {found.split()[0] for found in _all("COPY") if not found.startswith("--from=")}
    packages = _PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert copied == {"pyproject.toml", *packages}


def test_the_extras_are_those_that_the_driver_needs() -> None:
    (extras,) = [found for found in _all("ARG") if found.startswith("EXTRAS=")]
    assert set(extras.removeprefix("EXTRAS=").split(",")) == {"s3", "csi"}
    assert {"s3", "csi"} <= set(_PROJECT["project"]["optional-dependencies"])


def test_neither_deploy_nor_tests_are_in_the_wheel() -> None:
    packages = _PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert not {"deploy", "tests", "benchmarks", "docs"} & set(packages)


def test_the_chart_gives_its_entry_point_arguments_and_no_other_command(
    charts: Mapping[str, Rendered],
) -> None:
    assert _all("ENTRYPOINT") == ['["snapcask"]']
    assert "snapcask" in _PROJECT["project"]["scripts"]
    for workload in charts["controller"].workloads():
        driver = container(workload, "driver")
        assert "command" not in driver
        assert driver["args"][0] == "csi"


def test_it_does_not_run_as_root_unless_it_is_told_to() -> None:
    ((user,),) = [_all("USER")]
    assert int(user.partition(":")[0]) > 0
