"""Runs a period of the trainer on megatron-core with the npu kernel, a CPU reference behind the real operator; JSON.

Also looks up what the trainer calls of torch_npu itself, since nothing here can run it on an NPU.
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch_npu  # noqa: F401  registers the device and the operators
from npu_attention_child import calls, reference

sys.path.append(str(Path(__file__).parents[1] / "process"))
from megatron_cases import make_config, make_period, save_model

from prl_notebook.runtime.device import Device
from prl_notebook.training.megatron import tri_model
from prl_notebook.training.megatron.patches import megatron_on
from prl_notebook.training.megatron.rank import MegatronTrainerRank
from prl_notebook.training.torch_trainer import TorchTrainer

CALLED = ("is_available", "device_count", "set_device", "synchronize", "empty_cache", "get_rng_state", "set_rng_state")


def gradient_error(folder: Path) -> float:
    """Largest difference from the torch trainer with the split kernel."""
    model = save_model(folder / "model", "qwen3", tied=True)
    expected = TorchTrainer(model, make_config("torch", shared_prompt=True))._gradient([make_period(0)])
    tri_model.choose = lambda device, layout, dtype: "npu"
    trainer = MegatronTrainerRank(model, make_config(shared_prompt=True), rank=0, rendezvous=folder / "rendezvous")
    with megatron_on(trainer.device):
        found = trainer._gradient([make_period(0)])
    assert found.keys() == expected.keys()
    return max(float(np.abs(found[name] - g).max()) for name, g in expected.items())


def message_without_npu() -> str:
    try:
        Device("npu").open()
    except RuntimeError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    operators = torch.library.Library("npu", "IMPL")
    operators.impl("npu_fusion_attention", reference, "AutogradCPU")
    with tempfile.TemporaryDirectory() as folder:
        error = gradient_error(Path(folder))
    npu = torch.device("npu", 0)
    with megatron_on(npu):
        current = str(torch.cuda.current_device())
    print(
        json.dumps(
            {
                "error": error,
                "forms": sorted(set(calls)),
                "missing": [name for name in (*CALLED, "manual_seed") if not hasattr(torch.npu, name)],
                "current_device": current,
                "message": message_without_npu(),
            }
        )
    )
