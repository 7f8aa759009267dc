"""Which version is safe enough to be the only one left."""

import pytest

from tensorhub.core.messages import Holding, HostCopy
from tensorhub.core.names import Digest, Version

from .kit import worker
from .town import Town

ONE, TWO, ROOT = Version(1), Version(2), Digest("r")
TRAINER, KEEPER, SPOT = worker("trainer"), worker("keeper"), worker("spot")


@pytest.mark.parametrize("is_leaving", [False, True])
def test_a_host_copy_that_is_about_to_go_makes_no_version_safe(is_leaving: bool) -> None:
    """It was told to go for the sake of the version before, which is given up only when the new one is safe."""
    town = Town()
    town.joins(TRAINER, buffer=Holding(TWO, ROOT, published=True))
    copy = HostCopy(1, TWO, ROOT, whole=True, leaving=is_leaving)
    town.joins(KEEPER, buffer=Holding(ONE, ROOT), copies=(copy,))
    town.joins(SPOT, reliable=False, buffer=Holding(TWO, ROOT))
    town.says(SPOT, buffer=Holding(TWO, ROOT), ended=1)
    assert town.server.state.models[TRAINER.model].newest_established == (ONE if is_leaving else TWO)
