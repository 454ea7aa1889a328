"""Nonces that were used, and browsers' sessions that were signed out. Those that are still good are stored nowhere.

Invariant: `spend` says True once for a nonce, whoever asks at the same time.
"""

from __future__ import annotations

import hashlib
from datetime import datetime

from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from control_plane.db.models import SpentNonce


def spend(session: Session, nonce: str, ends_at: datetime) -> bool:
    """Use a nonce up, and say whether this was the first time.

    Args:
        session: a writing one.
        nonce: checked to be ours.
        ends_at: from when on it is refused without being looked up, and can be forgotten.

    Returns:
        Whether it was not used before.
    """
    digest = hashlib.sha256(nonce.encode()).hexdigest()
    if session.get(SpentNonce, digest) is not None:
        return False
    try:
        with session.begin_nested():
            session.add(SpentNonce(digest=digest, ends_at=ends_at))
    except IntegrityError:  # another one was faster
        return False
    return True


def is_spent(session: Session, nonce: str) -> bool:
    """Say whether a nonce was used, or a browser's session signed out."""
    return session.get(SpentNonce, hashlib.sha256(nonce.encode()).hexdigest()) is not None
