"""The check of a site's own certificate: until when the coordinator accepts its key."""

from __future__ import annotations

import datetime
from pathlib import Path

from cryptography import x509

from fedsurrogate.client_app.diagnostics.findings import Finding
from fedsurrogate.common.security.enrolment import CERTIFICATE

SOON = datetime.timedelta(days=30)
RENEW = (
    "renew it: `site enrol SITE --hospital NAME --contact ADDRESS` in the folder above this site's, "
    "and send the file SITE.csr to the coordinator"
)


def check_certificate(key: Path) -> Finding | None:
    """How long this site's key is accepted.

    Args:
        key: file of the private key, next to which the certificate is.

    Returns:
        None for a site without a certificate, whose key is accepted for as long as it is
        registered.
    """
    file = key.expanduser().with_name(CERTIFICATE)
    if not file.is_file():
        return None
    try:
        until = x509.load_pem_x509_certificate(file.read_bytes()).not_valid_after_utc
    except (OSError, ValueError, x509.InvalidVersion) as error:
        return Finding(
            "certificate",
            "FAIL",
            f"{CERTIFICATE} cannot be read ({type(error).__name__})",
            f"take {CERTIFICATE} from the site kit again",
        )
    now = datetime.datetime.now(datetime.UTC)
    if until <= now:
        return Finding("certificate", "FAIL", f"this site's ended on {until:%Y-%m-%d}", RENEW)
    facts = f"this site's is valid until {until:%Y-%m-%d}"
    if until <= now + SOON:
        return Finding("certificate", "WARN", facts, RENEW)
    return Finding("certificate", "PASS", facts)
