"""tests/sanitizing.py says by its exit status when it looked at nothing."""

import shutil

import pytest
import sanitizing


@pytest.fixture
def tool(monkeypatch):
    """Play compute-sanitizer: what it says of the planted fault, then of the tests."""

    def plays(*answers):
        answers = iter(answers)
        monkeypatch.setattr(sanitizing, "find_tool", lambda: "compute-sanitizer")
        monkeypatch.setattr(sanitizing, "watched", lambda *command: next(answers))

    return plays


SEEN = 9, "========= Invalid __global__ read of size 4 bytes"


def test_no_tool_is_no_proof(monkeypatch, capsys):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(sanitizing.glob, "glob", lambda pattern: [])
    assert sanitizing.main([]) == 2
    said = capsys.readouterr()
    assert "nothing was looked at: no compute-sanitizer" in said.err and not said.out


@pytest.mark.parametrize("answer", [(0, ""), (9, "Error: no CUDA-capable device"), (1, SEEN[1])], ids=str)
def test_a_blind_tool_is_no_proof(answer, tool, capsys):
    """A planted fault that it does not name, or does not count."""
    tool(answer)
    assert sanitizing.main([]) == 3
    said = capsys.readouterr()
    assert "nothing was looked at: compute-sanitizer does not see a planted fault" in said.err and not said.out


@pytest.mark.parametrize("status, expected", [(0, 0), (1, 1), (9, 1)])
def test_what_was_looked_at(status, expected, tool, capsys):
    tool(SEEN, (status, "of the tests"))
    assert sanitizing.main([]) == expected
    said = capsys.readouterr().out
    assert "a planted read beyond the end is seen" in said and ("clean" in said) == (not status)
