"""From `--data_path=s3://…` to a pyarrow filesystem, and from what can go wrong there to one line.

Invariant: credentials come from the environment or the URI and are never printed: `shown` drops them and the
URI's options.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from fms_fsdp.errors import MissingInput, StorageError, UserError

SCHEMES = {"s3": "s3", "gs": "gs", "az": "abfs", "file": "file"}  # ours and pyarrow's
PERMANENT = (FileNotFoundError, PermissionError, NotADirectoryError, IsADirectoryError)
_DENIED = re.compile("ACCESS_DENIED|INVALID_ACCESS_KEY|SIGNATURE|CREDENTIAL|STATUS 40[13]|UNAUTHENTICATED")
_CREDENTIALS = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, and check the bucket's policy",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS, or write gs://anonymous@BUCKET for a public one",
    "az": "set AZURE_STORAGE_ACCOUNT and log in, or write az://ACCOUNT@CONTAINER",
    "file": "check the folder's permissions",
}


def shown(uri: str) -> str:
    """Returns the URI without credentials and options: fit for a log."""
    parts = urlsplit(uri)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}".rstrip("/")


def is_denied(error: BaseException) -> bool:
    """Says whether the storage refused the credentials, or found none: trying again is no use."""
    return isinstance(error, PermissionError) or _DENIED.search(str(error).upper()) is not None


def open_filesystem(uri: str) -> tuple[Any, str]:
    """Returns (pyarrow FileSystem, path in it). Its own retries are turned down: `RemoteFiles` has the say.

    Raises: UserError for a scheme or URI that is not understood; OSError.
    """
    scheme = urlsplit(uri).scheme
    if scheme not in SCHEMES:
        known = ", ".join(f"{name}://" for name in SCHEMES)
        raise UserError(
            f"--data_path ({shown(uri)}) must be a folder or begin with one of {known}; correct the path"
        )
    if scheme != "file" and not urlsplit(uri).netloc:
        raise UserError(f"--data_path ({scheme}://) must name a bucket; write {scheme}://BUCKET/FOLDER")
    from pyarrow import fs

    account = os.environ.get("AZURE_STORAGE_ACCOUNT")
    if scheme == "az":
        rest = uri.partition("://")[2]
        named = "@" in rest.split("/")[0]
        if not named and not account:
            raise UserError(f"--data_path ({shown(uri)}) must name an account; {_CREDENTIALS['az']}")
        uri = f"abfs://{rest}" if named else f"abfs://{account}@{rest}"
    if scheme == "gs" and "retry_limit_seconds" not in uri:
        uri += f"{'&' if '?' in uri else '?'}retry_limit_seconds=3"
    filesystem, path = fs.FileSystem.from_uri(uri)
    return (_s3(uri, filesystem.region) if scheme == "s3" else filesystem), path.rstrip("/")


def _s3(uri: str, region: str) -> Any:
    """Returns the filesystem of a URI that pyarrow has accepted, with one try a request and longer to
    connect."""
    from pyarrow import fs

    parts = urlsplit(uri)
    options: dict[str, Any] = {
        name: {"true": True, "false": False}.get(value.lower(), value)
        for name, value in parse_qsl(parts.query)
        if name in ("scheme", "endpoint_override", "force_virtual_addressing", "tls_ca_file_path")
    }
    if parts.username and parts.password:
        options |= {"access_key": unquote(parts.username), "secret_key": unquote(parts.password)}
    one_try = fs.AwsStandardS3RetryStrategy(max_attempts=1)
    return fs.S3FileSystem(region=region, connect_timeout=5, retry_strategy=one_try, **options)


@contextmanager
def start_errors(uri: str) -> Iterator[None]:
    """Turns what goes wrong in opening and listing into one line: `--data_path (value) rule; remedy`."""
    name = f"--data_path ({shown(uri)})"
    try:
        yield
    except OSError as error:
        reason = " ".join(str(error).split())
        # an access token is Google's: later on it may be the network's fault
        if is_denied(error) or "ACCESS TOKEN" in reason.upper():
            remedy = _CREDENTIALS[urlsplit(uri).scheme]
            raise UserError(f"{name} cannot be opened with these credentials: {reason}; {remedy}") from error
        if isinstance(error, PERMANENT) or "NO_SUCH_BUCKET" in reason:
            raise MissingInput(f"{name} does not exist: {reason}; correct the bucket or folder") from error
        raise StorageError(
            f"{name} cannot be listed: {reason}; check network, region and endpoint"
        ) from error
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"{name} is not a URI that pyarrow.fs reads: {error}; correct the URI") from error
