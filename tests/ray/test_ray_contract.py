"""The contract of backends, for those whose workers are on a cluster."""

import pytest

from tests.process.test_contract import *  # noqa: F403
from tests.process.test_contract import WITH_WORKERS

pytestmark = pytest.mark.usefixtures("cluster")


@pytest.fixture(params=[each for each in WITH_WORKERS if each.on_nodes])
def backend(request):
    return request.param
