"""Used nonces of agents, and browser sessions that users signed out. Unused nonces are not stored."""

from __future__ import annotations

import hashlib
from datetime import datetime

from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from control_plane.db.models import SpentNonceRow


def spend(session: Session, nonce: str, ends_at: datetime) -> bool:
    """Mark a verified nonce of this server as used. Return True once per nonce, even for concurrent calls.

    After its expiry `ends_at`, the server rejects the nonce without a lookup, so retention may delete the row.
    """
    digest = hashlib.sha256(nonce.encode()).hexdigest()
    if session.get(SpentNonceRow, digest) is not None:
        return False
    try:
        with session.begin_nested():
            session.add(SpentNonceRow(digest=digest, ends_at=ends_at))
    except IntegrityError:  # A concurrent transaction has used the nonce first.
        return False
    return True


def is_spent(session: Session, nonce: str) -> bool:
    """Return whether a nonce was used, or a browser session with this id was signed out."""
    return session.get(SpentNonceRow, hashlib.sha256(nonce.encode()).hexdigest()) is not None
