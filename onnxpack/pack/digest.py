"""Digests of a pack: of its content, reproducible everywhere, and of its files, byte for byte."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any

from onnxpack import records
from onnxpack.pack.manifest import FileRecord, KernelRecord, SiteRecord, TensorRecord
from onnxpack.planning.records import Execution


def content_digest(
    graph_sha256: str,
    data_sha256: str,
    tensors: Iterable[TensorRecord],
    sites: Iterable[SiteRecord],
    kernels: Iterable[KernelRecord],
    plan: Execution | None = None,
) -> str:
    """Over graph, float data, weights, plan and the input key of each kernel: what decides the numbers.

    Compiled ELFs are not in it: their bytes differ from run to run of the toolchain, the key of their inputs does not.
    """
    return _sha256(
        {
            "graph": graph_sha256,
            "data": data_sha256,
            "tensors": [
                [t.name, list(t.shape), t.format, t.params, sorted((n, f.dtype, f.sha256) for n, f in t.fields.items())]
                for t in tensors
            ],
            "sites": [records.to_dict(site) for site in sites],
            "kernels": [[k.key, k.m, k.k, k.n] for k in kernels],
            "plan": records.to_dict(plan),
        }
    )


def files_digest(files: Iterable[FileRecord]) -> str:
    """Over path, size and digest of every file but the manifest itself."""
    return _sha256([[f.path, f.nbytes, f.sha256] for f in files])


def _sha256(data: Any) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
