"""Request and response models of the API, one module per resource.

`python -m control_plane.contract` generates the OpenAPI document, the client's service model and the dashboard's types
from these models. Field names on the wire are PascalCase, as in AWS's APIs, and reuse SageMaker's terms where it has
one. Times are seconds since 1970. Durations are whole seconds unless they are measurements. A field without a value is
omitted, never null.

Invariant: validation of a request needs the request alone. `api/admission.py` checks what depends on the fleet or on
the uploaded source.
"""
