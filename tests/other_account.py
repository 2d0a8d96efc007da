"""Code that runs as another account of this machine."""

import sys

ACCOUNT = 65534
# Imports come first: folders of the first account's Python may be closed to the other.
_BECOME = f"""
import grpc, grpc._channel, grpc._interceptor, psutil, flwr.supercore.interceptors
from flwr.proto import control_pb2, control_pb2_grpc, fab_pb2, runtime_pb2, runtime_pb2_grpc
import os
os.setgroups([]); os.setgid({ACCOUNT}); os.setuid({ACCOUNT})
"""


def as_other_account(code: str, *arguments: str) -> list[str]:
    """The command of a process, which root alone may start, that runs code under the other account."""
    return [sys.executable, "-c", _BECOME + code, *arguments]
