"""Who presents the certificate at the coordinator's address: the coordinator, or a device on the
way that inspects TLS.
"""

from __future__ import annotations

import socket
import ssl
from pathlib import Path


def presented(plain: socket.socket, host: str) -> bytes:
    """The certificate that is presented on a connection, without any check.

    Args:
        plain: the connection, without TLS so far.
        host: whose certificate is asked for.

    Returns:
        The certificate (DER).

    Raises:
        OSError: if the connection fails.
    """
    context = ssl.create_default_context()
    # Nothing is sent over this connection; it only shows the certificate.
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    with context.wrap_socket(plain, server_hostname=host) as secured:
        return secured.getpeercert(binary_form=True) or b""


def inspector(der: bytes, authority: Path) -> str:
    """The issuer of a certificate, if that is not an authority of a federation.

    Authorities of `coordinator certs` have the common name fedsurrogate and a number.

    Args:
        der: the certificate.
        authority: file of the federation's authority.

    Returns:
        The issuer; empty if it is such an authority, or unreadable.
    """
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    try:
        issuer = x509.load_der_x509_certificate(der).issuer
        own = x509.load_pem_x509_certificate(authority.expanduser().read_bytes()).subject
        names, organisations = (
            [str(each.value) for each in issuer.get_attributes_for_oid(which)]
            for which in (NameOID.COMMON_NAME, NameOID.ORGANIZATION_NAME)
        )
    # TypeError, KeyError: for a name in a kind of text that is not allowed, or not known.
    except (ValueError, TypeError, KeyError, x509.InvalidVersion, OSError):
        return ""
    if issuer == own or any(name.startswith("fedsurrogate ") for name in names):
        return ""
    return ", ".join(dict.fromkeys([*names, *organisations])) or issuer.rfc4514_string()
