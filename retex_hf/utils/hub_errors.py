"""One-sentence explanations of the Hub's errors for the user, without secrets in them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub import constants, get_token
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    IncompleteSnapshotError,
    LocalEntryNotFoundError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from ..errors import HubError, first_line

LOG_IN = "log in with `hf auth login`, or pass token="
# A user name and password within a URL.
CREDENTIALS = re.compile(r"(?<=://)[^/@\s]+@")
# HTTPError is raised by the HTTP client: no connection, a timeout, an invalid header.
HUB_ERRORS = (HTTPError, HFValidationError, LocalEntryNotFoundError, LocalTokenNotFoundError, OfflineModeIsEnabled)


@contextmanager
def hub_errors(doing: str, repo_id: str, token: str | bool | None = None) -> Iterator[None]:
    """Turn the Hub's errors within this context into a `HubError` that begins with what was being done."""
    check_token(token)
    try:
        yield
    except HUB_ERRORS as error:
        raise HubError(f"Cannot {without_secrets(doing, token)}: {explain(error, repo_id, token)}") from None


def check_token(token: str | bool | None) -> None:
    """Refuse a token that is no valid HTTP header: the HTTP client would quote it in its error and its log."""
    if isinstance(token, str) and not re.fullmatch(r"[!-~]+", token):
        raise HubError("The token holds blanks, line breaks or other characters that cannot be sent: give it without.")


def explain(error: Exception, repo_id: str, token: str | bool | None = None) -> str:
    """Explain an error of the Hub, or of the connection to it, without secrets."""
    return without_secrets(_reason(error, repo_id).rstrip(".") + ".", token)


def without_secrets(text: str, token: str | bool | None = None) -> str:
    """Return a text with this token, the user's own token and passwords in URLs masked.

    >>> from retex_hf.utils.hub_errors import without_secrets
    >>> without_secrets("no answer of https://me:word@hub.example to hf_writes", "hf_writes")
    'no answer of https://***@hub.example to ***'
    """
    # Strip, because the HTTP client quotes an invalid token whole and may show its line break as "\n".
    for secret in (token, _own_token()):
        if isinstance(secret, str) and secret.strip():
            text = text.replace(secret.strip(), "***")
    return CREDENTIALS.sub("***@", text)


def _own_token() -> str | None:
    try:
        return get_token()
    except OSError:  # a token that cannot be read is in no message
        return None


def _reason(error: Exception, repo_id: str) -> str:
    status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
    if isinstance(error, HFValidationError):
        return f'{repo_id!r} is not a repository id, which is "name" or "owner/name"'
    if isinstance(error, OfflineModeIsEnabled):
        return "offline mode is on (HF_HUB_OFFLINE)"
    if isinstance(error, LocalTokenNotFoundError):
        return f"there is no token: {LOG_IN}"
    if isinstance(error, LocalEntryNotFoundError):
        cause = error.__cause__
        if isinstance(cause, HTTPError) and not isinstance(cause, HfHubHTTPError):
            return _unreachable(cause)
        if isinstance(cause, HfHubHTTPError):
            return _reason(cause, repo_id)
        part = "only a part of it" if isinstance(error, IncompleteSnapshotError) else "nothing of it"
        return f"the Hub is not asked (offline mode, or local_files_only=True) and {part} is in the local cache"
    if isinstance(error, GatedRepoError):
        return f"access to {repo_id} ({status}) must be asked for on its page first"
    if isinstance(error, RepositoryNotFoundError):
        return (
            f"there is no repository {repo_id} that you may see ({status}): check its name; if it is private, {LOG_IN}"
        )
    if isinstance(error, RevisionNotFoundError):
        return f"{repo_id} has no such revision ({status})"
    if status == 401:
        return f"the Hub does not know the token, or needs one (401): {LOG_IN}"
    if status == 403:
        return f"the token has no permission for that at {repo_id} (403)"
    if status == 412:
        return f"{repo_id} was changed by someone else meanwhile (412): push again"
    if isinstance(error, HfHubHTTPError):
        return f"the Hub answers {status}: {error.server_message or first_line(error)}"
    return _unreachable(error)


def _unreachable(error: Exception) -> str:
    return f"the Hub at {constants.ENDPOINT} cannot be reached: {first_line(error)}"
