"""Refusals of requests, in OpenAI's error shape."""

from __future__ import annotations

from typing import Any

from ..errors import RetexError

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


class ApiError(RetexError):
    """A request that is refused or failed: one sentence, an HTTP status, and the field at fault.

    >>> from retex_hf.serving.errors import ApiError
    >>> ApiError(404, "There is no model 'x'.", param="model", code="model_not_found").body()["error"]["type"]
    'not_found_error'
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.headers = status, param, code, headers or {}

    def body(self) -> dict[str, Any]:
        """Return the response body."""
        kind = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def too_many(message: str, seconds: int) -> ApiError:
    """Return the refusal of a request that may be sent again after some seconds."""
    return ApiError(429, message, code="overloaded", headers={"retry-after": str(seconds)})


def as_api_error(error: RetexError) -> ApiError:
    """Return an error of this library as the refusal of a request."""
    return error if isinstance(error, ApiError) else ApiError(400, str(error))
