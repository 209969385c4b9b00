"""The document of the HTTP interface, as OpenAPI 3.1 (https://spec.openapis.org/oas/v3.1.1.html)."""

from modelrunner.openapi.document import make_document
from modelrunner.openapi.operation import Operation

__all__ = ["Operation", "make_document"]
