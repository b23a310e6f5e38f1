"""The restart point of a completion-order stage."""

from pipegraph.engine.stage.sender import Watermark


def test_a_failure_in_work_holds_the_restart_point_though_later_items_are_done():
    mark = Watermark()
    mark.start(0, 0, 1)
    mark.hold(1)  # of the item at 1
    mark.start(2, 2, 3)
    assert mark.finish(2) == 0
    assert mark.finish(0) == 1
    mark.start(3, 3, 4)
    assert mark.finish(3) == 1


def test_a_failure_before_any_item_holds_the_start_of_the_epoch():
    mark = Watermark()
    mark.hold(0)
    mark.start(1, 1, 2)
    assert mark.finish(1) is None
