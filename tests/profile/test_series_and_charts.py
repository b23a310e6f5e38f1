"""Figures over time in bounded memory, and the geometry of charts."""

from itertools import pairwise

import pytest

from pipegraph.profile.report import HEIGHT, WIDTH, histogram, line_chart
from pipegraph.profile.series import MAX_MOMENTS, Moment, append


def at(second, items=10):
    return Moment(second, second + 1, items, 0.25, (float(second % 4),))


def test_many_moments_keep_their_sums_in_bounded_memory():
    found = []
    for second in range(5_005):
        append(found, at(second))
        assert len(found) <= MAX_MOMENTS
    assert sum(moment.samples for moment in found) == 50_050
    lengths = [moment.end_s - moment.start_s for moment in found]
    assert max(lengths) <= 4 * 5_005 / MAX_MOMENTS
    assert sum(moment.stall_s for moment in found) == pytest.approx(5_005 / 4)
    assert found[0].start_s == 0 and found[-1].end_s == 5_005
    assert all(a.end_s == b.start_s for a, b in pairwise(found))
    assert found[0].samples_per_s == pytest.approx(10)


def test_a_short_run_keeps_every_moment():
    found = []
    for second in range(5):
        append(found, at(second))
    assert found == [at(second) for second in range(5)]


def test_a_chart_stays_inside_its_area_and_says_what_it_shows():
    chart = line_chart("Throughput", "samples/s", [1, 2, 4], [0, 130, 70])
    points = [tuple(map(float, point.split(","))) for point in chart.points.split()]
    assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for x, y in points)
    assert points[-1][0] == WIDTH and points[0][1] == HEIGHT
    assert [label for _, label in chart.ticks] == ["0", "100", "200"]
    assert "on average 66.7 samples/s" in chart.summary


def test_a_histogram_counts_everything_once_and_shows_rare_waits():
    bars = histogram([(1e-7, 5), (0.0015, 900), (0.003, 90), (700.0, 1)])
    assert sum(bar.count for bar in bars) == 996
    assert sum(bar.share for bar in bars) == pytest.approx(1)
    rare = bars[-1]
    assert (rare.range, rare.count) == ("50 s and more", 1) and rare.length > 0.02
    assert bars[0].range == "under 10 us" and max(bar.length for bar in bars) == 1
    assert histogram([]) == []
