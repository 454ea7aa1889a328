"""Request and response models of the API, one module per resource.

`python -m control_plane.contract` generates the OpenAPI document, the client's service model and the dashboard's types
from these models. Field names on the wire are PascalCase, as in AWS's APIs. Fields that SageMaker's API also has use
SageMaker's names. Times are seconds since 1970. Durations are whole seconds unless they are measurements. JSON bodies
omit a field without a value; no field is null.

Invariant: the models check only rules that depend on the request alone. `api/admission.py` checks rules that also
depend on the fleet or on the uploaded source.
"""
