"""What a run prints, on a terminal and elsewhere."""

import io

from rich.console import Console

from convjax.training.display import Display


def shown(*, terminal: bool, steps: range) -> str:
    output = io.StringIO()
    console = Console(file=output, force_terminal=terminal, width=120, highlight=False)
    display = Display(steps.stop - 1, 10, console)
    for step in steps:
        display.show(step, 0.5, 1234.0)
    display.say("[a] line")
    display.close()
    return output.getvalue()


def test_plain_lines_are_sparse():
    lines = shown(terminal=False, steps=range(1, 1001)).splitlines()
    assert lines[0] == "step 1/1000  loss 0.5000  1,234 images/s  0:00:08 left"  # 9,990 images
    assert lines[-1] == "[a] line"
    assert 15 <= len(lines) <= 25


def test_a_terminal_gets_a_bar_with_the_same_words():
    output = shown(terminal=True, steps=range(1, 11))
    assert "step 10/10  loss 0.5000  1,234 images/s  0:00:00 left" in output
    assert "━" in output
    assert "[a] line" in output
