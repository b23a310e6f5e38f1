"""The types of what pipegraph returns, for annotations: nobody makes these.

>>> def sizes(found: pg.types.Tuning) -> None: ...
"""

from pipegraph.engine.stage.ledger import Quarantined as Quarantined
from pipegraph.measurements import StageProfile as StageProfile
from pipegraph.planning.plan import Plan as Plan
from pipegraph.profile.search import Tuning as Tuning
from pipegraph.profile.values import ChannelProfile as ChannelProfile
