"""A wrong argument ends a command with one line."""

import pytest

from pallas_kernels.command_line import OneLineParser


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--wdth=3"], "error: unknown argument --wdth; the nearest is --width\n"),
        (["--wid=3"], "error: unknown argument --wid; the nearest is --width\n"),
        (["3"], "error: unknown argument 3\n"),
        (["--width=wide"], "error: argument --width: invalid int value: 'wide'\n"),
    ],
)
def test_one_line_and_status_2(arguments, line, capsys):
    parser = OneLineParser("python -m command", "What it does.")
    parser.add_argument("--width", type=int)
    with pytest.raises(SystemExit) as stopped:
        parser.options(arguments)
    assert stopped.value.code == 2
    assert capsys.readouterr().err == line
    assert parser.options(["--width=3"]).width == 3


def test_the_description_is_printed_as_it_is_written(capsys):
    with pytest.raises(SystemExit):
        OneLineParser("python -m command", "One.\n\n    a table").options(["--help"])
    assert "usage: python -m command" in (out := capsys.readouterr().out)
    assert "One.\n\n    a table\n" in out
