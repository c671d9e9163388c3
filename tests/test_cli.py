"""The command line: what it says, and its exit status."""

import os
import subprocess
import sys
import types

import pytest

import gdn_ref
from gdn_ref import cli, identities
from gdn_ref.identities import IDENTITIES, Identity, algebra


def help_of(capsys, *argv):
    with pytest.raises(SystemExit) as stopped:
        cli.main([*argv, "--help"])
    assert stopped.value.code == 0
    return capsys.readouterr().out


def test_help_teaches_without_loading_demo(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "gdn_ref.demo", None)  # importing it now raises
    text = help_of(capsys)
    assert "python -m gdn_ref prove --chapter 1" in text and "python -m gdn_ref demo" in text
    assert "against the definition: seconds" in text and "a minute" not in text
    text = help_of(capsys, "prove")
    assert "examples:" in text and "--chapter 5" in text and "What the verdicts mean" in text


def test_no_command_shows_the_help(capsys):
    assert cli.main([]) == 2
    assert "commands" in capsys.readouterr().out


def test_list_runs_nothing(capsys, monkeypatch):
    monkeypatch.setattr(identities, "check", lambda tag: pytest.fail("a proof was run"))
    assert cli.main(["prove", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [f"({i.tag})" for i in IDENTITIES]
    assert sum("refuted" in line for line in lines) == sum(i.refuted for i in IDENTITIES)


def test_a_chapter_and_tags_in_the_books_order(capsys):
    assert cli.main(["prove", "--chapter", "1", "--tag", "3.6", "(2.2)"]) == 0
    captured = capsys.readouterr()
    tags = [line.split()[0] for line in captured.out.splitlines() if line.startswith("(")]
    assert tags == ["(1.1)", "(1.2)", "(1.3)", "(1.4)", "(1.5)", "(2.2)", "(3.6)"]
    assert "residual: β·(W·Kᵀ − K·Wᵀ)·k·kᵀ" in captured.out
    assert "7 identities: 5 proved, 2 refuted as they should be, 0 failed" in captured.out
    assert captured.err == ""  # no bar off a terminal


def break_one(monkeypatch, tag="1.3"):
    def proof():
        algebra.equal(algebra.scalars("x")[0], 0)

    wrong = [Identity(tag, "x = 0", proof) if i.tag == tag else i for i in IDENTITIES]
    monkeypatch.setattr(identities, "IDENTITIES", wrong)


def test_a_failing_identity_gives_one(capsys, monkeypatch):
    break_one(monkeypatch)
    assert cli.main(["prove", "--chapter", "1"]) == 1
    out = capsys.readouterr().out
    assert "(1.3)  FAILED" in out and "residual: x" in out and out.rstrip().endswith("FAILED: 1.3")
    assert "3 proved, 1 refuted as they should be, 1 failed" in out


@pytest.mark.parametrize("argv, message", [
    (["prove", "--tag", "99.9"], "--tag: found '99.9', expected one of 1.1"),
    (["prove", "--tag", "5.99"], "--tag: found '5.99', expected one of 5.1, 5.2"),
    (["prove", "--chapter", "77"], "--chapter: found 77, expected one of 1, 2"),
    (["prove", "--chapter", "x"], "invalid int value"),
    (["improve"], "invalid choice"),
])
def test_bad_arguments_give_two(argv, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(argv)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_without_sympy_it_says_what_to_install(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "sympy", None)
    monkeypatch.delitem(sys.modules, "gdn_ref.identities")
    monkeypatch.delattr(gdn_ref, "identities")
    assert cli.main(["prove"]) == 2
    captured = capsys.readouterr()
    assert 'pip install "gdn_ref[notebooks]"' in captured.err and "Traceback" not in captured.err
    assert captured.out == ""


@pytest.mark.parametrize("with_tqdm", [True, False])
def test_progress_on_a_terminal(with_tqdm, capsys, monkeypatch):
    if not with_tqdm:
        monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert cli.main(["prove", "--chapter", "1"]) == 0
    captured = capsys.readouterr()
    assert "proving" in captured.err and "proving" not in captured.out


def test_demo_is_handed_its_arguments(monkeypatch):
    demo = types.ModuleType("gdn_ref.demo")
    demo.add_arguments = lambda parser: parser.add_argument("--seconds", type=int, default=1)
    demo.main = lambda args: args.seconds
    monkeypatch.setitem(sys.modules, "gdn_ref.demo", demo)
    assert cli.main(["demo", "--seconds", "5"]) == 5
    demo.main = lambda args: None
    assert cli.main(["demo"]) == 0


def test_stopping_by_hand(capsys, monkeypatch):
    def stop(tag):
        raise KeyboardInterrupt

    monkeypatch.setattr(identities, "check", stop)
    assert cli.main(["prove"]) == 130
    assert "stopped" in capsys.readouterr().err


def test_as_a_module():
    """The real thing once, with an output encoding that has no Greek letters."""
    command = [sys.executable, "-m", "gdn_ref", "prove", "--tag", "3.1"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    assert "(3.1)  proved" in done.stdout and done.stderr == ""
