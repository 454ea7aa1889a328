"""Used nonces of agents, and browser sessions that were signed out.

Nonces that no agent has used are not stored.

Invariant: `spend` returns True once per nonce, even for concurrent calls.
"""

from __future__ import annotations

import hashlib
from datetime import datetime

from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from control_plane.db.models import SpentNonce


def spend(session: Session, nonce: str, ends_at: datetime) -> bool:
    """Mark a nonce as used.

    Args:
        session: from `Database.write`.
        nonce: a nonce that this server issued; the caller has verified its origin.
        ends_at: expiry of the nonce. Afterwards the nonce is rejected without a lookup, so its row can be deleted.

    Returns:
        True if this call marked the nonce. False if the nonce was used before.
    """
    digest = hashlib.sha256(nonce.encode()).hexdigest()
    if session.get(SpentNonce, digest) is not None:
        return False
    try:
        with session.begin_nested():
            session.add(SpentNonce(digest=digest, ends_at=ends_at))
    except IntegrityError:  # a concurrent transaction has stored the nonce
        return False
    return True


def is_spent(session: Session, nonce: str) -> bool:
    """Return whether a nonce was used, or a browser session was signed out."""
    return session.get(SpentNonce, hashlib.sha256(nonce.encode()).hexdigest()) is not None
