"""Shells complete commands, options and their values, without TensorFlow."""

import shutil
import subprocess
import sys

import pytest
import typer

from geutil.cli.commands import app
from tests import tflite_files
from tests.cli.processes import environment
from tests.settings import needs_eager

pytestmark = [needs_eager]

# typer looks for the shell among the processes above, where there may be none.
NAMED = {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}


@pytest.fixture
def complete(capsys):
    """Return what a shell asks for: the command, told so by variables."""

    def ask(*arguments, **variables):
        with pytest.MonkeyPatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            capsys.readouterr()
            # Typer reads them as it makes the command of the app.
            command = typer.main.get_command(app)
            with pytest.raises(SystemExit) as ended:
                command.main(list(arguments), prog_name="geutil")
            code = ended.value.code or 0
        said = capsys.readouterr()
        assert (code, said.err) == (0, "")
        return said.out

    return ask


CASES = [
    ("geutil in", ["inspect"]),
    ("geutil s", ["split", "splice", "strip"]),
    ("geutil quantize --meth", ["--method"]),
    ("geutil quantize --method m", ["moving_average", "min_max", "mse"]),
    ("geutil cut net --format p", ["pbtxt"]),
    ("geutil batch-size net an", ["any"]),
    # Nothing: the shell goes on to complete the names of files.
    ("geutil fold ne", []),
    ("geutil diff net oth", []),
    ("geutil calibrate net --data d", []),
]


def test_bash(complete):
    found = []
    for line, _ in CASES:
        asked = {"COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
        told = complete(_GEUTIL_COMPLETE="complete_bash", **asked)
        found.append((line, told.split()))
    assert found == CASES


def test_other_shells(complete):
    for shell in ("zsh", "fish"):
        told = complete(
            _GEUTIL_COMPLETE=f"complete_{shell}",
            _TYPER_COMPLETE_ARGS="geutil in",
            _TYPER_COMPLETE_FISH_ACTION="get-args",
        )
        assert "inspect" in told
        assert "splice" not in told
    asked = {"_TYPER_COMPLETE_ARGS": "geutil inspect ne"}
    told = complete(_GEUTIL_COMPLETE="complete_zsh", **asked)
    # It goes on to files.
    assert told.strip() == "_files"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_is_shown_and_installed(complete, shell, tmp_path):
    told = complete("--show-completion", shell, **NAMED)
    assert f"_GEUTIL_COMPLETE=complete_{shell}" in told
    complete("--install-completion", shell, HOME=str(tmp_path), **NAMED)
    files = [p for p in tmp_path.rglob("*") if p.is_file()]
    assert any(f"complete_{shell}" in p.read_text() for p in files)


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_itself_completes(tmp_path):
    command = tmp_path / "geutil"
    command.write_text(
        f"#!{sys.executable}\nfrom geutil.cli.main import main\nmain()\n"
    )
    command.chmod(0o755)
    script = f"""
source <({command} --show-completion bash)
COMP_WORDS=({command} quantize --method e); COMP_CWORD=3
_geutil_completion {command}
echo "${{COMPREPLY[@]}}"
"""
    done = subprocess.run(
        ["bash", "--norc", "-c", script],
        env=environment(**NAMED),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["entropy"]


WITHOUT_TENSORFLOW = """
--help
--version
quantize --help
--show-completion bash
inspect /nowhere
fold /nowhere -o x
cut /nowhere -o x
check / /nowhere
cut mixed.tflite --ops 0:1 -o cut.tflite
rename mixed.tflite --input x=y -o renamed.tflite
inspect mixed.tflite
view mixed.tflite -o page.html
ops mixed.tflite --type SIN
diff mixed.tflite mixed.tflite --html both.html
"""
LOOKS_AT_FILES = 6
CODE = """
import sys
from geutil.cli.commands import app
from geutil.cli.main import run
for line in sys.argv[1].split("\\n"):
    try:
        code = run(app, line.split())
    except SystemExit as ended:
        code = ended.code
    imported = sorted({"tensorflow", "numpy"} & set(sys.modules))
    print("imported by", line, code, *imported)
"""


def test_tensorflow_is_not_imported(tmp_path):
    """What is wrong with the arguments is said at once."""
    (tmp_path / "mixed.tflite").write_bytes(tflite_files.mixed().blob)
    lines = WITHOUT_TENSORFLOW.strip()
    done = subprocess.run(
        [sys.executable, "-c", CODE, lines],
        env=environment(**NAMED),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Traceback" not in done.stderr
    told = [line for line in done.stdout.splitlines() if line.startswith("imported by")]
    wanted = [
        f"imported by {line} {int('/nowhere' in line)}" for line in lines.splitlines()
    ]
    # What is in a file of TFLite is read with numpy.
    files = [f"{line} numpy" for line in wanted[-LOOKS_AT_FILES:]]
    assert told == [*wanted[:-LOOKS_AT_FILES], *files]
    assert (tmp_path / "page.html").exists()
    assert (tmp_path / "both.html").exists()
