"""Request and response models of the API, one module per resource.

`python -m control_plane.contract` generates the OpenAPI document, the client's service model and the dashboard's types
from these models. Field names on the wire are PascalCase, as in AWS's APIs. They reuse SageMaker's terms where
SageMaker has a term for the field. Times are seconds since 1970. Durations are whole seconds unless they are
measurements. A field without a value is omitted, never null.

Invariant: the models validate a request from its content alone. `api/admission.py` checks what depends on the fleet or
on the uploaded source.
"""
