"""Addresses that a workload is given: which of them are on this machine."""

from __future__ import annotations


def remote_store(uri: str) -> bool:
    """Whether an address of mlflow's is anything else than files of this machine: a server here is one as well.

    >>> [remote_store(uri) for uri in ("https://example.org", "databricks", "postgresql+psycopg2://u@h/db", "mlflow-artifacts:/1")]
    [True, True, True, True]
    >>> [remote_store(uri) for uri in ("", "./mlruns", "file:///x/mlruns", "sqlite:///mlflow.db", "runs:/1/model")]
    [False, False, False, False, False]
    """
    scheme, colon, _ = uri.partition(":")
    if not colon:
        return scheme in ("databricks", "databricks-uc", "uc")
    return scheme.partition("+")[0].lower() not in ("file", "sqlite", "runs", "models")
