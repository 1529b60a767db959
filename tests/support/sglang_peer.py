"""Outputs of the layers of sglang-kt's own wrapper, with the `kt_kernel` that this process imports, written to a file:
run with kt-kernel on PYTHONPATH it is the peer of ours.

    python tests/support/sglang_peer.py FILES CHECKPOINT OUT.safetensors
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.support.sglang_files import Checkpoint, Release, ServerArgs, random_batch

SIZES = (1, 7, 64)
GPU_EXPERTS = 2


def main() -> int:
    files, path, target = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    device = torch.device("cuda")
    checkpoint = Checkpoint.make(path)
    release = Release(files, "sglang-kt-0.7.2", pytest.MonkeyPatch())
    outs = {}
    for index, (method, layer) in enumerate(release.layers(checkpoint, ServerArgs(str(path), GPU_EXPERTS), device)):
        for tokens in SIZES:
            batch = random_batch(tokens, device, seed=tokens + index)
            out = method.apply(layer, batch.dispatch()).hidden_states
            torch.cuda.synchronize()
            outs[f"{index}.{tokens}"] = out.cpu().contiguous()
    save_file(outs, target)
    return 0


if __name__ == "__main__":
    sys.exit(main())
