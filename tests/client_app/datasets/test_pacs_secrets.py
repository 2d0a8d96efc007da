"""A secret of a PACS travels through TLS, or stays on this machine."""

import pytest

from fedsurrogate.client_app.datasets.pacs import VARIABLES, client_of
from fedsurrogate.common.errors import ConfigError

NONE = dict.fromkeys(VARIABLES, "")


@pytest.mark.parametrize("secret", ["TOKEN", "PASSWORD"])
@pytest.mark.parametrize(
    "url", ["http://pacs.example/web", "http://10.0.0.7:8042/web", "http://[fd00::7]/web"]
)
def test_a_secret_is_not_sent_over_http(url: str, secret: str) -> None:
    with pytest.raises(ConfigError, match=f"{VARIABLES[secret]}.*use https://") as found:
        client_of(url, NONE | {"USER": "site", secret: "s3cret"})
    assert "s3cret" not in str(found.value)


@pytest.mark.parametrize(
    ("url", "token"),
    [
        ("https://pacs.example/web", "t"),
        ("http://127.0.0.1:8042/web", "t"),
        ("http://localhost/web", "t"),
        ("http://[::1]:8042/web", "t"),
        ("http://10.0.0.7:8042/web", ""),
    ],
)
def test_tls_this_machine_and_no_secret_are_allowed(url: str, token: str) -> None:
    assert client_of(url, NONE | {"TOKEN": token}).base_url == url
