"""Declarations of measurements: from a counter over merging and intervals to every view."""

import pipegraph as pg
from pipegraph import measurements, operators as ops
from pipegraph.measurements import StageProfile, in_view


def test_every_view_for_people_shows_what_was_declared_for_it():
    graph = pg.Graph("declared")
    graph.add(ops.FromIterable(range(20)), name="numbers").then(lambda x: x, name="same")
    with graph.loader() as loader:
        list(loader)
        found = loader.profile()
    titles = next(line for line in str(found).splitlines() if line.startswith("stage "))
    heads = {"table": titles, "notebook": found._repr_html_()}
    for view, head in heads.items():
        assert [title for _, _, title in in_view(StageProfile, view) if title not in head] == []
    numbers, metrics = found.scalars(), loader.metrics()
    assert {f"same/{log}" for _, _, log in in_view(StageProfile, "log")} <= numbers.keys()
    assert all(f"pipegraph_{name.split()[0]}{{" in metrics for _, _, name in in_view(StageProfile, "metric"))


def test_the_docstring_of_a_record_describes_every_field():
    for record in (pg.types.StageProfile, pg.types.ChannelProfile, pg.Profile):
        for name, each in measurements.measurements(record).items():
            assert f"{name}: {each.about}" in record.__doc__
