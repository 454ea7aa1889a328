"""The contract: every request and response of the API, one module per resource.

`python -m control_plane.contract` generates the OpenAPI document, the client's service model and the dashboard's types
from these models. Names on the wire are PascalCase, as in AWS's APIs, with SageMaker's words where it has one. Times
are seconds since 1970. Durations are whole seconds unless they are measurements. A field without a value is absent,
never null.

Invariant: a request that validates is well formed by itself. `api/admission.py` checks what depends on a fleet or a
source.
"""
