# SPDX-License-Identifier: Apache-2.0
"""Make or refresh ``.venv`` with flycomm in it: what this machine has already is used, the rest is asked of pip.

``make`` calls this with the Python that the environment is made from. A torch (and a flydsl) that this Python can
import is shared, so that a machine with a ROCm or CUDA build keeps it, also where there is no package index.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import shlex
import subprocess
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"

_NOT_HERE = """
import importlib.metadata, importlib.util, sys
for name in sys.argv[1:]:
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        if importlib.util.find_spec(name.replace("-", "_")) is None:
            print(name)
"""


def say(sentence: str) -> None:
    print(f"setup: {sentence}", flush=True)


def name_of(requirement: str) -> str:
    return re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0]


def missing(requirements: list[str]) -> list[str]:
    """Names of the requirements of which .venv has no version at all."""
    names = [name_of(requirement) for requirement in requirements]
    found = subprocess.run([PYTHON, "-c", _NOT_HERE, *names], check=True, capture_output=True, text=True)
    return found.stdout.split()


def pip_install(*arguments: str) -> bool:
    quiet = ("-qq", "--disable-pip-version-check", "--no-input", "--retries", "2")
    return subprocess.run([PYTHON, "-m", "pip", "install", *quiet, *arguments]).returncode == 0


def create() -> None:
    """An empty .venv; it sees this Python's packages if torch is one of them."""
    share = subprocess.run([sys.executable, "-c", "import torch"], capture_output=True).returncode == 0
    say(f"creating .venv with {sys.executable}" + (" and the packages it has (torch is one of them)" if share else ""))
    with_pip = importlib.util.find_spec("ensurepip") is not None  # without it, a shared pip does
    venv.create(VENV, system_site_packages=share, with_pip=with_pip, symlinks=True)
    if share and sys.prefix != sys.base_prefix:
        # made from a virtual environment: "system" is then the Python below it, which is not where torch lies
        folders = dict.fromkeys((sysconfig.get_path("purelib"), sysconfig.get_path("platlib")))
        lines = [f"import site; site.addsitedir({folder!r})" for folder in folders]
        site = Path(sysconfig.get_path("purelib", vars={"base": str(VENV)}))
        (site / "shared_packages.pth").write_text("\n".join(lines) + "\n")


def require(names: list[str], *arguments: str) -> None:
    """Have pip install what flycomm cannot do without; end with one sentence if a name is missing all the same."""
    if not pip_install(*arguments) and (lacking := missing(names)):
        sys.exit(
            f"setup: pip could not install {', '.join(lacking)}: give pip an index that has them, "
            f"or put them where {sys.executable} imports from (PYTHONPATH will do), then run make again"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--torch", default="torch", help="what pip is asked for if there is no torch")
    parser.add_argument("--extras", nargs="+", default=[], help="extras of pyproject.toml; done without if pip fails")
    arguments = parser.parse_args()
    if not PYTHON.exists():
        create()
    if missing(["pip"]):
        sys.exit("setup: .venv has no pip: install python3-venv (or set PYTHON), then run make clean and make again")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    if missing(["torch"]):
        if Path("/dev/kfd").exists():
            say("there is an AMD GPU but no torch; without a ROCm build of torch, flycomm runs on the host target only")
        say(f"installing {arguments.torch}")
        require(["torch"], *shlex.split(arguments.torch))
    needed = project["build-system"]["requires"] + project["project"]["dependencies"]
    # a flydsl or torch that imports is used whatever its version, and without asking pip, which may not know of it
    require(needed, *(one for one in needed if name_of(one) not in ("flydsl", "torch") or missing([one])))
    for extra in arguments.extras:
        wanted = project["project"]["optional-dependencies"][extra]
        say(f"installing what {extra} needs")
        if not pip_install(*wanted) and (lacking := missing(wanted)):
            say(f"pip could not install {', '.join(lacking)}, going on without (extra {extra})")
    say("building flycomm")
    if not pip_install("--no-deps", "--no-build-isolation", "-e", str(ROOT)):
        sys.exit("setup: flycomm's C library was not built: see the messages above; it needs a C compiler (cc)")


if __name__ == "__main__":
    main()
