"""Checkpoints: any tree, saved at one mesh and loaded at another, bit for bit.

On `torch.distributed.checkpoint`; safetensors for models of Hugging Face's layout.

>>> import tempfile, torch, yafsdp_fn as yf
>>> mesh = yf.make_mesh(fsdp=4, emulate=True)
>>> state = {"w": yf.distribute(torch.arange(6.0), mesh), "step": 3, "rate": 0.1}
>>> folder = tempfile.mkdtemp()
>>> yf.checkpoint.save(folder, state)
>>> smaller = yf.make_mesh(fsdp=3, emulate=True)
>>> like = state | {"w": yf.distribute(torch.zeros(6), smaller)}
>>> found = yf.checkpoint.load(folder, like)
>>> yf.full(found["w"]), found["step"], found["rate"]
(tensor([0., 1., 2., 3., 4., 5.]), 3, 0.1)
"""

# ruff: noqa: I001 - the order is a reader's, not the alphabet's

# Any tree.
from ._save import save as save
from ._save import async_save as async_save
from ._save import AsyncSave as AsyncSave
from ._load import load as load

# Models of Hugging Face's layout.
from ._safetensors import load_safetensors as load_safetensors
from ._safetensors import save_safetensors as save_safetensors

# Errors.
from ._together import CheckpointError as CheckpointError
