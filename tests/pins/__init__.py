"""What must not change: pinned digests, descriptions, plans, claims, refusals, bytes of messages,
and stored runs.

`facts.py` and `messages.py` are the only files here that name parts of the product: code that moves
is followed there, and no pin changes. `renew.py` writes the pins; `stored.py` has written the
stored runs.
"""
