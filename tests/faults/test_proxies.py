"""Sites that reach the SuperLink through an HTTP proxy, with and without a password, and while it
is away for a while.
"""

import time
from collections.abc import Iterator

import pytest

from tests.e2e.hospitals import Hospital
from tests.e2e.processes import federation
from tests.faults.conftest import Scene
from tests.faults.proxies import ConnectProxy

pytestmark = pytest.mark.faults


@pytest.fixture(scope="module", params=["", "clinic:secret"], ids=["open", "with a password"])
def behind(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Scene, ConnectProxy]]:
    """North and south behind a proxy; `site app` has the same variables as the SuperNode."""
    home = tmp_path_factory.mktemp("proxy")
    sites = {name: Hospital(home, name, seed) for seed, name in enumerate(("north", "south"))}
    configs = [site.node_config for site in sites.values()]
    proxy = ConnectProxy(request.param)
    at_nodes = {
        "https_proxy": proxy.url.replace("://", f"://{request.param}@")
        if request.param
        else proxy.url
    }
    with federation(home / "flower", configs, at_nodes=at_nodes) as running:
        yield Scene(running, sites, home), proxy


def test_sites_take_part_through_the_proxy(behind: tuple[Scene, ConnectProxy]) -> None:
    scene, proxy = behind
    assert scene.result(scene.submit())["sites"]["used"] == 2
    assert set(proxy.targets) == {scene.running.fleet}, "and nothing else goes through it"
    assert scene.charged() == {"north": 1, "south": 1}


def test_a_proxy_that_is_away_for_half_a_minute_costs_no_site(
    behind: tuple[Scene, ConnectProxy],
) -> None:
    scene, proxy = behind
    before = scene.charged()
    run = scene.submit_held("south", deadline=240.0)
    proxy.stop()
    scene.sites["south"].let_go()
    time.sleep(30)
    proxy.start()
    assert scene.result(run)["sites"]["used"] == 2
    assert scene.charged() == {name: count + 1 for name, count in before.items()}
