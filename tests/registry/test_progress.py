"""Progress lines for pipes: one per stage, and one at intervals."""

from numflow.registry.progress import Lines


def test_long_work_is_heard_of_now_and_then(capsys):
    now = [0.0]
    lines = Lines(pause=10, clock=lambda: now[0])
    lines.stage("quantising", 200)
    for second in range(1, 25):
        now[0] = second
        lines.done(second * 8)
    lines.stage("calibrating", 0)
    for window in range(1, 13):
        now[0] += 3
        lines.part(window, 12, "window")
    assert capsys.readouterr().err.splitlines() == [
        "quantising (200 B)", "quantising: 40%", "quantising: 80%", "calibrating", "window 4 of 12", "window 8 of 12",
        "window 12 of 12"]
